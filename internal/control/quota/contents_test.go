package quota_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// TestContents refuses whatever adds an object to a full namespace, and nothing else.
func TestContents(t *testing.T) {
	used := int64(0)
	q, err := quota.New(quota.Config{
		Reader: &namespaces{annotations: map[string]string{quota.AnnotationContents: "1Mi"}}, Log: telemetry.Discard(),
		Contents: func(context.Context, string) (int64, error) { return used, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, full := range []bool{false, true} {
		if full {
			used = 1 << 20
		}
		for name, do := range map[string]func() error{
			"a sandbox":        func() error { _, err := q.Hold(t.Context(), quota.Request{Namespace: team}); return err },
			"a paused sandbox": func() error { return q.AddPaused(t.Context(), team) },
			"a snapshot":       func() error { _, err := q.Add(t.Context(), checkpoint("a", "")); return err },
			"a volume":         func() error { return q.CheckContents(t.Context(), team) },
			"a write":          func() error { return q.Write(t.Context(), team, 10, 1) },
		} {
			err := do()
			if (err != nil) != full || full && (!errors.Is(err, errs.ErrExhausted) || !strings.Contains(errs.Text(err), "at most 1Mi of objects")) {
				t.Errorf("%s, full %v: %v", name, full, err)
			}
		}
		if _, err := q.Hold(t.Context(), quota.Request{Namespace: team, Paused: true}); err != nil {
			t.Errorf("a resume, full %v: %v", full, err)
		}
		if err := q.Write(t.Context(), team, 10, 0); err != nil {
			t.Errorf("a write that adds nothing, full %v: %v", full, err)
		}
	}
}

// TestWriteRate has a namespace write its burst at once, and then a share each second; another one is not concerned.
func TestWriteRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := newQuotas(t, quota.Limits{}, nil)
		const large = 1 << 20
		written := func() (n int64) {
			for q.Write(t.Context(), team, large, 0) == nil {
				n += large
			}
			return n
		}
		if n := written(); n != quota.WriteBurst {
			t.Errorf("%d bytes at once", n)
		}
		if err := q.Write(t.Context(), team, large, 0); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(errs.Text(err), "at most 2Mi of objects are written a second") {
			t.Errorf("one more: %v", err)
		}
		if err := q.Write(t.Context(), "team-b", large, 0); err != nil {
			t.Errorf("another namespace: %v", err)
		}
		time.Sleep(10 * time.Second)
		if n := written(); n != 10*quota.WriteRate {
			t.Errorf("%d bytes after ten seconds", n)
		}
	})
}
