package node

import (
	"errors"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Issue 11: the reported disk of a sandbox was the host's.
func TestDiskUsed(t *testing.T) {
	t.Parallel()
	n, _ := newMachine(t).node(func(c *Config) { c.Unbounded = true })
	s := object()
	ensure(t, n, s)
	used := func() int64 {
		t.Helper()
		bytes, err := n.DiskUsed(t.Context(), refOf(s))
		must(t, err)
		return bytes
	}
	write := func(name string) {
		t.Helper()
		if out, code := run(t, n, s, "dd if=/dev/zero of=/root/"+name+" bs=1M count=20 && busybox sync"); code != 0 {
			t.Fatal(out)
		}
	}
	write("a")
	first := used()
	if first < 20<<20 || first > 25<<20 {
		t.Errorf("%d bytes after 20 MiB", first)
	}
	write("b")
	u := n.handles.Lookup(s.UID)
	u.SetDiskUse(registry.DiskUse{Bytes: first, Until: time.Now().Add(time.Hour)})
	if got := used(); got != first {
		t.Errorf("measured again while fresh: %d, was %d", got, first)
	}
	u.SetDiskUse(registry.DiskUse{Bytes: first, Until: time.Now()})
	if got := used(); got < first+20<<20 || got > first+25<<20 {
		t.Errorf("%d bytes after 20 MiB more than %d", got, first)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
	if _, err := n.DiskUsed(t.Context(), refOf(s)); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("of one that is gone: %v", err)
	}
}
