package node

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/disk"
)

// memoryMarker is in the memory of a sandbox, and put together there, so that no file or argument has it.
const memoryMarker = "swordfish-of-the-memory"

// The memory of a stored sandbox is on disk in the clear, and is not where it is encrypted. Both come back after a restart of the
// server that unmounts what a restart of the machine does.
func TestStoredMemoryEncrypted(t *testing.T) {
	t.Parallel()
	for name, encrypt := range map[string]bool{"encrypted": true, "clear": false} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			set := func(c *Config) { c.EncryptMemory = encrypt }
			t.Cleanup(func() { must(t, disk.DiscardBelow(m.cfg.DataDir)) })
			n, stop := m.node(atOnce, set)
			s := object()
			ensure(t, n, s)
			p := startProgram(t, n, s)
			run(t, n, s, "a=swordfish; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo $a-of-the-memory; done > /dev/shm/marked")
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
			stop()
			must(t, disk.Unmount(filepath.Join(m.cfg.DataDir, "encrypted")))
			if found := contains(t, m.cfg.DataDir, memoryMarker); (len(found) > 0) == encrypt {
				t.Errorf("the marker is in %v", found)
			}
			n, _ = m.node(atOnce, set)
			resume(t, n, s)
			p.continues(n)
			if out, _ := run(t, n, s, "tail -n 1 /dev/shm/marked"); strings.TrimSpace(out) != memoryMarker {
				t.Errorf("memory has %q", out)
			}
			must(t, n.Remove(t.Context(), refOf(s)))
			clean(t, n)
		})
	}
}

// contains names the files below a directory that have a text. Images of disks are among them, whose holes are left out.
func contains(t *testing.T, dir, text string) (found []string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		for end := int64(0); ; {
			from, err := f.Seek(end, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			if err == nil {
				end, err = f.Seek(from, unix.SEEK_HOLE)
			}
			if err != nil {
				return err
			}
			if has(t, io.NewSectionReader(f, from, end-from), text) {
				found = append(found, path)
				return nil
			}
		}
	}))
	return found
}

func has(t *testing.T, r io.Reader, text string) bool {
	t.Helper()
	buf := make([]byte, 1<<20)
	for kept := 0; ; {
		n, err := r.Read(buf[kept:])
		if bytes.Contains(buf[:kept+n], []byte(text)) {
			return true
		}
		if err == io.EOF {
			return false
		}
		must(t, err)
		kept = copy(buf, buf[max(kept+n-len(text), 0):kept+n])
	}
}
