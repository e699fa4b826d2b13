package apiserver_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// A direct call has the effect of a request.
func TestDirectDoesAsRequestsDo(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Listen = "" })
	c, d := clientAs(t, s, apiserver.UserController), s.Direct(apiserver.UserController)
	ctx := t.Context()
	made := sandbox("a")
	if err := d.Create(ctx, made); err != nil {
		t.Fatal(err)
	}
	if made.UID == "" || made.ResourceVersion == "" || made.Spec.OperatingMode != agents.ModeRunning {
		t.Errorf("created without a UID, a version or defaults: %+v", made)
	}
	made.Labels = map[string]string{"mine": "yes"}
	made.Status.NodeName = "forged"
	if err := d.Update(ctx, made); err != nil {
		t.Fatal(err)
	}
	var byRequest, direct agents.Sandbox
	key := client.ObjectKeyFromObject(made)
	if err := errors.Join(c.Get(ctx, key, &byRequest), d.Get(ctx, key, &direct)); err != nil {
		t.Fatal(err)
	}
	for how, got := range map[string]*agents.Sandbox{"request": &byRequest, "direct": &direct, "update": made} {
		if got.Labels["mine"] != "yes" || got.ResourceVersion != made.ResourceVersion || got.Status.NodeName != "" {
			t.Errorf("by %s: %+v", how, got)
		}
	}
}

func TestDirectDeletes(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Listen = "" })
	c, d, ctx := clientAs(t, s, apiserver.UserController), s.Direct(apiserver.UserController), t.Context()
	deleted, other := sandbox("deleted"), types.UID("other")
	if err := d.Create(ctx, deleted); err != nil {
		t.Fatal(err)
	}
	if err := d.Delete(ctx, deleted, client.Preconditions{UID: &other}); !apierrors.IsConflict(err) {
		t.Errorf("delete with another UID: %v", err)
	}
	if err := d.Delete(ctx, deleted, client.Preconditions{UID: &deleted.UID}); err != nil {
		t.Fatal(err)
	}
	if err := c.Get(ctx, client.ObjectKeyFromObject(deleted), &agents.Sandbox{}); !apierrors.IsNotFound(err) {
		t.Errorf("after a delete: %v", err)
	}
}

func TestDirectRefusesAsRequestsDo(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Listen = "" })
	d, ctx := s.Direct(apiserver.UserController), t.Context()
	made := sandbox("a")
	if err := d.Create(ctx, made); err != nil {
		t.Fatal(err)
	}
	old := made.DeepCopy()
	made.Labels = map[string]string{"mine": "yes"}
	if err := d.Update(ctx, made); err != nil {
		t.Fatal(err)
	}
	broken := made.DeepCopy()
	broken.Spec.OperatingMode = "Sideways"
	missing := sandbox("missing")
	missing.ResourceVersion = "1"
	for what, err := range map[string]struct {
		err  error
		want func(error) bool
	}{
		"an old version":   {d.Update(ctx, old), apierrors.IsConflict},
		"no version":       {d.Update(ctx, sandbox("a")), apierrors.IsBadRequest},
		"a wrong field":    {d.Update(ctx, broken), apierrors.IsInvalid},
		"no object":        {d.Update(ctx, missing), apierrors.IsNotFound},
		"get of no object": {d.Get(ctx, client.ObjectKeyFromObject(missing), missing), apierrors.IsNotFound},
		"a second one":     {d.Create(ctx, sandbox("a")), apierrors.IsAlreadyExists},
		"the node creates": {s.Direct(apiserver.UserNode).Create(ctx, sandbox("b")), apierrors.IsForbidden},
		"no such kind":     {d.Create(ctx, &corev1.Pod{}), func(err error) bool { return errors.Is(err, errs.ErrInvalid) }},
		"no namespace":     {d.Create(ctx, &agents.Sandbox{}), apierrors.IsBadRequest},
		"an option":        {d.Create(ctx, sandbox("c"), client.DryRunAll), func(err error) bool { return errors.Is(err, errs.ErrInvalid) }},
	} {
		if err.err == nil || !err.want(err.err) {
			t.Errorf("%s: %v", what, err.err)
		}
	}
}

// One of many writers over the same version wins.
func TestDirectUpdatesAreConditional(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Listen = "" })
	d := s.Direct(apiserver.UserController)
	made := sandbox("a")
	if err := d.Create(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var won atomic.Int32
	for i := range 16 {
		wg.Go(func() {
			mine := made.DeepCopy()
			mine.Labels = map[string]string{"owner": strconv.Itoa(i)}
			switch err := d.Update(t.Context(), mine); {
			case err == nil:
				won.Add(1)
			case !apierrors.IsConflict(err):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := won.Load(); n != 1 {
		t.Errorf("%d writers won, want 1", n)
	}
}

func TestDirectNeedsAServerThatRuns(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Listen = "" })
	d := s.Direct(apiserver.UserController)
	s.Stop()
	if err := d.Create(context.WithoutCancel(t.Context()), sandbox("a")); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("after the end: %v", err)
	}
}

// What an informer lists and watches directly is subject to the user's rights, and ends with the server, which waits for it.
func TestDirectListerWatcher(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Listen = "" })
	ctx := context.WithoutCancel(t.Context())
	of := func(user string, o client.Object) cache.ListerWatcherWithContext {
		return cache.ToListerWatcherWithContext(s.Direct(user).ListerWatcher(o))
	}
	for what, lw := range map[string]cache.ListerWatcherWithContext{
		"another's kind": of(apiserver.UserNode, &barchan.APIKey{}),
		"no such kind":   of(apiserver.UserController, &corev1.Pod{}),
	} {
		_, listErr := lw.ListWithContext(ctx, metav1.ListOptions{})
		_, watchErr := lw.WatchWithContext(ctx, metav1.ListOptions{})
		for _, err := range []error{listErr, watchErr} {
			if !apierrors.IsForbidden(err) && !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	lw := of(apiserver.UserController, &agents.Sandbox{})
	w, err := lw.WatchWithContext(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	create(t, clientAs(t, s, apiserver.UserController), sandbox("a"))
	if e := <-w.ResultChan(); e.Type != watch.Added || e.Object.(*agents.Sandbox).Name != "a" {
		t.Errorf("got %+v", e)
	}
	began := time.Now()
	s.Stop()
	if took := time.Since(began); took > 4*time.Second { // less than the server waits at most
		t.Errorf("the end took %s", took)
	}
	if e, open := <-w.ResultChan(); open {
		t.Errorf("after the end: %+v", e)
	}
	w.Stop()
	if _, err := lw.ListWithContext(ctx, metav1.ListOptions{}); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("list after the end: %v", err)
	}
}
