package cache

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/testkit/fakeapi"
)

// TestReadsWaitForEveryKind holds the list of one kind after the other: no read of another kind returns before it.
func TestReadsWaitForEveryKind(t *testing.T) {
	for _, held := range ServerKinds() {
		t.Run(nameOf(held), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := fakeapi.New()
				resource := strings.ToLower(nameOf(held)) + "s"
				if resource == "sandboxs" {
					resource = "sandboxes"
				}
				release := api.Hold(resource)
				c, err := New(t.Context(), Config{REST: api.Config()})
				if err != nil {
					t.Fatal(err)
				}
				ran := make(chan error, 1)
				ctx, cancel := context.WithCancel(t.Context())
				go func() { ran <- c.Run(ctx) }()
				defer func() {
					cancel()
					if err := <-ran; err != nil {
						t.Error(err)
					}
				}()
				synctest.Wait() // all but the held kind are listed
				key := types.NamespacedName{Namespace: "a", Name: "b"}
				for name, read := range map[string]func(context.Context) error{
					"get":       func(ctx context.Context) error { _, err := c.Sandbox(ctx, key); return err },
					"list":      func(ctx context.Context) error { _, err := c.Templates(ctx, ""); return err },
					"by index":  func(ctx context.Context) error { _, err := c.SandboxByID(ctx, "x"); return err },
					"namespace": func(ctx context.Context) error { _, err := c.Namespace(ctx, "x"); return err },
				} {
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					err := read(ctx)
					cancel()
					if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "not listed yet: "+nameOf(held)+":") {
						t.Errorf("%s = %v, want it to wait for the held kind", name, err)
					}
				}
				release()
				if err := c.WaitSynced(t.Context()); err != nil {
					t.Error(err)
				}
				if _, err := c.Sandbox(t.Context(), key); !errors.Is(err, errs.ErrNotFound) {
					t.Errorf("after the list: %v", err)
				}
			})
		})
	}
}

// failing does not start.
type failing struct{ crcache.Cache }

var errStart = errors.New("no start")

func (failing) Start(context.Context) error { return errStart }

// TestRunReturnsTheErrorOfTheStart requires the cause, and ends the waits.
func TestRunReturnsTheErrorOfTheStart(t *testing.T) {
	c, err := New(t.Context(), Config{REST: fakeapi.New().Config()})
	if err != nil {
		t.Fatal(err)
	}
	c.informers = failing{c.informers}
	if err := c.Run(t.Context()); !errors.Is(err, errStart) {
		t.Errorf("Run = %v", err)
	}
	if err := c.WaitSynced(t.Context()); !errors.Is(err, ErrStopped) {
		t.Errorf("WaitSynced = %v", err)
	}
}
