package cgroups

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const mib = 1 << 20

// unifiedDir has the files of a cgroup of version 2. They stand for the kernel, which on this machine may have version 1.
type unifiedDir struct {
	*testing.T
	dir string
}

func newUnifiedDir(t *testing.T) unifiedDir {
	t.Helper()
	d := unifiedDir{t, t.TempDir()}
	d.set("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
	d.set("memory.high", "max\n")
	d.set("memory.max", fmt.Sprintln(512*mib))
	d.uses(100*mib, 0)
	return d
}

func (d unifiedDir) set(file, text string) {
	d.Helper()
	if err := os.WriteFile(filepath.Join(d.dir, file), []byte(text), 0o600); err != nil {
		d.Fatal(err)
	}
}

// uses sets the memory in use and how much of it is page cache, a third of it active.
func (d unifiedDir) uses(current, cache int64) {
	d.Helper()
	d.set("memory.current", fmt.Sprintln(current))
	d.set("memory.stat", fmt.Sprintf("anon 4096\nshmem %d\nfile %d\ninactive_file %d\nactive_file %d\nslab_reclaimable 0\n", current-cache, current, cache-cache/3, cache/3))
}

func (d unifiedDir) want(file, text string) {
	d.Helper()
	if b, err := os.ReadFile(filepath.Join(d.dir, file)); err != nil || strings.TrimSpace(string(b)) != text {
		d.Errorf("%s is %q, %v; want %s", file, b, err, text)
	}
}

func (d unifiedDir) open() *OOM {
	d.Helper()
	o, err := openHigh(d.dir, 512*mib)
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() { _ = o.Close() })
	return o
}

func TestHighTakesTheLimitOver(t *testing.T) {
	d := newUnifiedDir(t)
	o := d.open()
	d.want("memory.high", "536870912")
	d.want("memory.max", "536870912")
	if err := o.Raise(32 * mib); err != nil {
		t.Fatal(err)
	}
	d.want("memory.high", "536870912")
	d.want("memory.max", "570425344")
	if err := o.GiveUp(); err != nil {
		t.Fatal(err)
	}
	d.want("memory.high", "max")
	d.want("memory.max", "536870912")
	if _, err := openHigh(filepath.Join(d.dir, "none"), 1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing cgroup: %v", err)
	}
}

func TestHighUse(t *testing.T) {
	for name, c := range map[string]struct {
		current, cache, raised int64
		want                   Use
	}{
		"below":                 {500 * mib, 0, 0, Use{Over: -12 * mib, Left: 12 * mib}},
		"beyond":                {513 * mib, 0, 32 * mib, Use{Over: mib, Left: 31 * mib}},
		"beyond, in page cache": {513 * mib, 200 * mib, 32 * mib, Use{Over: -199 * mib, Left: 31 * mib}},
		"at the raised limit":   {544 * mib, 0, 32 * mib, Use{Over: 32 * mib, Left: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			d := newUnifiedDir(t)
			o := d.open()
			if err := o.Raise(c.raised); err != nil {
				t.Fatal(err)
			}
			d.uses(c.current, c.cache)
			if got, err := o.Use(); err != nil || got != c.want {
				t.Errorf("%+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

func TestHighIsNotLoweredBelowTheUse(t *testing.T) {
	d := newUnifiedDir(t)
	o := d.open()
	if err := o.Raise(64 * mib); err != nil {
		t.Fatal(err)
	}
	d.uses(560*mib, 0)
	if err := o.Raise(32 * mib); !errors.Is(err, unix.EBUSY) {
		t.Errorf("lowered below the use: %v", err)
	}
	d.want("memory.max", "603979776")
	d.uses(560*mib, 100*mib) // the rest can be reclaimed
	if err := o.Raise(0); err != nil {
		t.Error(err)
	}
	d.want("memory.max", "536870912")
}

func TestHighNotifies(t *testing.T) {
	d := newUnifiedDir(t)
	o := d.open()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := o.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without an event: %v", err)
	}
	woken := make(chan error, 1)
	go func() { woken <- o.Wait(t.Context()) }()
	d.set("memory.events", "low 0\nhigh 1\nmax 0\noom 0\noom_kill 0\n")
	select {
	case err := <-woken:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(eventually.Patience):
		t.Error("an event is not noticed")
	}
}
