package oci

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// A known state is copied completely; an unknown one is left to runsc, without a call of written.
func TestCopyState(t *testing.T) {
	state := func(magic, head, rest string) string {
		return magic + string(binary.BigEndian.AppendUint64(nil, uint64(len(head)))) + head + rest
	}
	for name, tt := range map[string]struct {
		sent    string
		notLive bool
		rest    int64
	}{
		"a state":         {state(stateMagic, "{}", "x"+strings.Repeat("y", 3*narrowPipe)), false, 3 * narrowPipe},
		"too little":      {state(stateMagic, "{}", "xyz"), false, 2},
		"another format":  {state("gVisorTG", "{}", "xyz"), true, 0},
		"an endless head": {stateMagic + strings.Repeat("\xff", 8) + "xyz", true, 0},
		"no state":        {state(stateMagic, "{}", ""), true, 0},
		"nothing":         {"", true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			from, to, err := pipe()
			must(t, err)
			writer := os.NewFile(uintptr(to), "kernel")
			var sending sync.WaitGroup
			sending.Go(func() {
				_, _ = writer.WriteString(tt.sent) // fails after the reader has closed
				_ = writer.Close()
			})
			path := filepath.Join(t.TempDir(), "state")
			file, err := os.Create(path)
			must(t, err)
			calls := 0
			rest, err := copyState(t.Context(), file, from, func(context.Context) error { calls++; return nil })
			must(t, from.Close())
			must(t, file.Close())
			sending.Wait()
			if errors.Is(err, errNotLive) != tt.notLive || rest != tt.rest || (calls == 0) != tt.notLive {
				t.Errorf("%v, %d bytes after %d calls", err, rest, calls)
			}
			if got, err := os.ReadFile(path); !tt.notLive && (err != nil || string(got) != tt.sent) {
				t.Errorf("the file has %d bytes of %d, %v", len(got), len(tt.sent), err)
			}
		})
	}
}

// A writer of the pipe blocks until it is read, and gets an error when the reader closes.
func TestPipeBlocks(t *testing.T) {
	from, to, err := pipe()
	must(t, err)
	defer func() { _ = unix.Close(to) }()
	must(t, unix.SetNonblock(to, true))
	if n, err := unix.Write(to, make([]byte, 2*narrowPipe)); err != nil || n > narrowPipe {
		t.Errorf("wrote %d bytes, %v", n, err)
	}
	must(t, from.Close())
	if _, err := unix.Write(to, []byte("x")); !errors.Is(err, unix.EPIPE) {
		t.Errorf("without a reader: %v", err)
	}
}
