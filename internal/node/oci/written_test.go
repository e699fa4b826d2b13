package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// Files copied by Written match the image: the container is stopped meanwhile, and then runs or
// stays paused as configured.
func TestWrittenWhilePaused(t *testing.T) {
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	waiting := first.dial(t)
	defer waiting.close()
	for _, o := range []CheckpointOptions{
		{LeaveRunning: true, Digest: true}, {LeaveRunning: true, Direct: true}, {}, {LeaveRunning: true, Compression: memimage.Flate},
	} {
		var next *testSandbox
		image := filepath.Join(l.dir, "image")
		first.query(t, "write /flushed to disk")
		mapped := first.query(t, "mapped")
		count := first.query(t, "add")
		o.Written = func(context.Context) error {
			waiting.send(t)
			noImage(t, image)
			next = first.copyOf(t) //nolint:contextcheck // the test's own
			return nil
		}
		img, err := l.Checkpoint(t.Context(), first.id, image, o)
		must(t, err)
		if o.Digest != (img.Digest != "") || o.LeaveRunning != (img.Paused > 0) {
			t.Errorf("%+v: %+v", o, img)
		}
		must(t, memimage.Verify(t.Context(), image))
		if o.LeaveRunning {
			first.wantStatus(t, Running)
		} else {
			first.wantStatus(t, Paused)
			must(t, l.Resume(t.Context(), first.id))
		}
		waiting.receive(t)
		next.restore(t, image, RestoreOptions{Background: o.Compression == memimage.NoCompression})
		next.expect(t, "read /flushed", "to disk")
		if got := next.query(t, "read /mapped"); got[0] != mapped[0] {
			t.Errorf("what was written through memory is %q, want %q", got[:1], mapped[:1])
		}
		more := first.query(t, "add")
		if more == count {
			t.Errorf("it does not count on from %s", count)
		}
		next.expect(t, "add", more)
		must(t, memimage.Remove(image))
	}
}

// An error of Written leaves the container in its previous state.
func TestWrittenError(t *testing.T) {
	l := newTestHost(t)
	b := l.newSandbox(t).run(t)
	b.query(t, "hold 16")
	image := filepath.Join(l.dir, "image")
	refused := errors.New("disk full")
	try := func(leave bool, want Status) {
		t.Helper()
		_, err := l.Checkpoint(t.Context(), b.id, image, CheckpointOptions{
			LeaveRunning: leave, Written: func(context.Context) error { return refused },
		})
		if !errors.Is(err, refused) {
			t.Errorf("leave running %t: %v", leave, err)
		}
		b.wantStatus(t, want)
		noImage(t, image)
	}
	try(true, Running)
	try(false, Running)
	must(t, b.Pause(t.Context(), b.id))
	try(true, Paused)
	try(false, Paused)
	img, err := l.Checkpoint(t.Context(), b.id, image, CheckpointOptions{LeaveRunning: true, Written: func(context.Context) error { return nil }})
	if err != nil || img.Paused != 0 {
		t.Errorf("of a paused one: %+v, %v", img, err)
	}
	b.wantStatus(t, Paused) // unchanged
	must(t, b.Resume(t.Context(), b.id))
	b.expect(t, "held", "1 0")
}

// send sends a question without reading the answer.
func (c *probeConn) send(t *testing.T) {
	t.Helper()
	_, err := fmt.Fprintln(c.conn, "pid")
	must(t, err)
	must(t, c.conn.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	if n, err := c.conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it answers while it should be stopped: %d bytes, %v", n, err)
	}
	must(t, c.conn.SetReadDeadline(time.Now().Add(eventually.Patience)))
}

// receive requires the answer to a sent question.
func (c *probeConn) receive(t *testing.T) {
	t.Helper()
	if !c.lines.Scan() || c.lines.Text() != "1" {
		t.Errorf("it does not continue: %q, %v", c.lines.Text(), c.lines.Err())
	}
}

func noImage(t *testing.T, dir string) {
	t.Helper()
	if _, err := memimage.Read(dir); err == nil {
		t.Errorf("image exists at %s", dir)
	}
}

// BenchmarkSnapshot measures how long a container that is left running is stopped: "still" for its
// clients, "paused" as reported by Checkpoint, "whole" is Checkpoint itself; milliseconds.
//
//	go test -run '^$' -bench Snapshot -benchtime 10x ./internal/node/oci
func BenchmarkSnapshot(b *testing.B) {
	for name, question := range map[string]string{"small": "hold 0", "256MiB": "hold 256"} {
		b.Run(name, func(b *testing.B) {
			l := newTestHost(b)
			box := l.newSandbox(b).run(b)
			box.query(b, question)
			_, err := l.Build(b.Context())
			must(b, err)
			image := filepath.Join(l.dir, "image")
			var still, paused, whole time.Duration
			for b.Loop() {
				still += box.gap(b, func() {
					began := time.Now()
					img, err := l.Checkpoint(b.Context(), box.id, image, CheckpointOptions{
						LeaveRunning: true, Written: func(context.Context) error { return nil },
					})
					must(b, err)
					whole += time.Since(began)
					paused += img.Paused
				})
				must(b, memimage.Remove(image))
			}
			for name, sum := range map[string]time.Duration{"still": still, "paused": paused, "whole": whole} {
				b.ReportMetric(float64(sum.Microseconds())/1000/float64(b.N), name+"-ms")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
