package claimsuite

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// ends has a claim end now, under a policy.
func ends(policy extensions.ClaimShutdownPolicy) func(*extensions.SandboxClaim) {
	return func(c *extensions.SandboxClaim) {
		c.Spec.Lifecycle = &extensions.ClaimLifecycle{ShutdownTime: new(metav1.Now()), ShutdownPolicy: policy}
	}
}

func expiryRetains(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(), 1)
	c, s := w.served(w.claim("c"))
	// By its own timer, not by a change of the claim.
	c = update(w, c, func(c *extensions.SandboxClaim) {
		c.Spec.Lifecycle = &extensions.ClaimLifecycle{ShutdownTime: new(metav1.NewTime(time.Now().Add(3 * time.Second)))}
	})
	w.gone(s)
	c = w.refused(c, extensions.ReasonClaimExpired, "spec.lifecycle.shutdownTime")
	if c.Status.Sandbox.Name != "" {
		t.Errorf("an expired claim names %+v", c.Status.Sandbox)
	}
	// What has expired never comes back.
	update(w, c, func(c *extensions.SandboxClaim) { c.Spec.Lifecycle = nil })
	w.served(w.claim("later"))
	if all := w.owned(c); len(all) > 0 {
		t.Errorf("an expired claim got %d sandboxes", len(all))
	}
}

// A claim that a client extends in time keeps its sandbox, however late the controller's cache shows it.
func expiryExtended(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(), 1)
	c, s := w.served(w.claim("c"))
	until := func(end time.Time) {
		c = update(w, c, func(c *extensions.SandboxClaim) {
			c.Spec.Lifecycle = &extensions.ClaimLifecycle{ShutdownTime: new(metav1.NewTime(end))}
		})
	}
	until(time.Now().Add(5 * time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	// Not by the version: the cache may go past it at once, with the status that follows.
	_, err := cache.Wait(ctx, w.cache, client.ObjectKeyFromObject(c), func(c *extensions.SandboxClaim) (bool, error) {
		return c != nil && c.Spec.Lifecycle != nil, nil
	})
	must(t, err)
	w.hold()
	until(time.Now().Add(time.Hour))
	before := len(w.writes.all())
	eventually.True(t, "the controller did not try to end the claim", func() bool { return len(w.writes.all()) > before })
	w.release()
	w.served(c)
	for _, write := range w.writes.all() {
		if strings.HasPrefix(write, http.MethodDelete) {
			t.Errorf("unexpected write %s", write)
		}
	}
	if all := w.owned(c); len(all) != 1 || all[0].UID != s.UID {
		t.Errorf("the claim has %d sandboxes", len(all))
	}
}

func expiryDeletes(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(), 2)
	none := func(c *extensions.SandboxClaim) bool { return c == nil }

	c, s := w.served(w.claim("background"))
	update(w, c, ends(extensions.ClaimDelete))
	w.awaitClaim(c, "went", none)
	w.gone(s)

	c, s = w.served(w.claim("foreground"))
	w.nodes.Holding(func(s *agents.Sandbox) bool { return s.DeletionTimestamp != nil })
	update(w, c, ends(extensions.ClaimDeleteForeground))
	await(w, s, &agents.SandboxList{}, "was being deleted", func(s *agents.Sandbox) bool { return s != nil && s.DeletionTimestamp != nil })
	now := &extensions.SandboxClaim{}
	must(t, w.api.Get(t.Context(), client.ObjectKeyFromObject(c), now))
	if now.DeletionTimestamp == nil {
		t.Errorf("the claim is not being deleted while its sandbox is")
	}
	w.nodes.Holding(nil)
	w.gone(s)
	w.awaitClaim(c, "went", none)
}

func ttl(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(), 1)
	c, s := w.served(w.claim("c", func(c *extensions.SandboxClaim) {
		c.Spec.Lifecycle = &extensions.ClaimLifecycle{TTLSecondsAfterFinished: new(int32(1))}
	}))
	s = w.report(s, func(s *agents.Sandbox) {
		meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: agents.ConditionFinished, Status: metav1.ConditionTrue, Reason: agents.ReasonPodSucceeded, Message: "done"})
	})
	w.awaitClaim(c, "finished", func(c *extensions.SandboxClaim) bool {
		f := meta.FindStatusCondition(c.Status.Conditions, agents.ConditionFinished)
		return f != nil && f.Reason == agents.ReasonPodSucceeded
	})
	w.gone(s)
	w.refused(c, extensions.ReasonClaimExpired, "ttlSecondsAfterFinished")
}

// report changes the status of a sandbox.
func (w *fixture) report(s *agents.Sandbox, change func(*agents.Sandbox)) *agents.Sandbox {
	w.t.Helper()
	for {
		must(w.t, w.api.Get(w.t.Context(), client.ObjectKeyFromObject(s), s))
		change(s)
		err := w.api.Status().Update(w.t.Context(), s)
		if apierrors.IsConflict(err) {
			continue
		}
		must(w.t, err)
		return s
	}
}

func outlives(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	x := w.template()
	p := w.pool(x, 1)
	c, s := w.served(w.claim("c"))
	must(t, w.api.Delete(t.Context(), p))
	must(t, w.api.Delete(t.Context(), x))
	w.refused(w.claim("late"), extensions.ReasonWarmPoolNotFound, "spec.warmPoolRef.name") // so they are seen
	w.nodes.Holding(func(*agents.Sandbox) bool { return true })                            // the node would report otherwise
	w.report(s, func(s *agents.Sandbox) { s.Status.PodIPs = []string{"10.1.2.3"} })
	c = w.awaitClaim(c, "showed the new address", func(c *extensions.SandboxClaim) bool {
		return slices.Equal(c.Status.Sandbox.PodIPs, []string{"10.1.2.3"})
	})
	if ready(c).Status != metav1.ConditionTrue || c.Status.Sandbox.Name != s.Name {
		t.Errorf("status %+v", c.Status)
	}
	w.report(s, func(s *agents.Sandbox) {
		meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: agents.ReasonDependenciesNotReady, Message: "probe"})
	})
	w.refused(c, agents.ReasonDependenciesNotReady, "probe")
}

func sandboxMissing(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(), 2)
	c, s := w.served(w.claim("c"))
	must(t, w.api.Delete(t.Context(), s))
	w.refused(c, extensions.ReasonSandboxMissing, s.Name)
	w.served(w.claim("another"))
	if all := w.owned(c); len(all) > 0 {
		t.Errorf("a claim whose sandbox is gone got %d others", len(all))
	}
}

func claimDeleted(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(), 1)
	c, s := w.served(w.claim("c"))
	must(t, w.api.Delete(t.Context(), c))
	w.gone(s)
}

// onStatus calls do before each write of a claim's status, with what writes it.
func onStatus(do func(ctx context.Context, to client.Client, c *extensions.SandboxClaim) error) interceptor.Funcs {
	return interceptor.Funcs{SubResourceUpdate: func(ctx context.Context, to client.Client, sub string, obj client.Object, opts ...client.SubResourceUpdateOption) error {
		if c, ok := obj.(*extensions.SandboxClaim); ok {
			if err := do(ctx, to, c); err != nil {
				return err
			}
		}
		return to.SubResource(sub).Update(ctx, obj, opts...)
	}}
}

func claimDeletedWhileServed(t *testing.T, cfg *Config) {
	var once sync.Once
	named := make(chan string, 1)
	w := start(t, cfg, options{hooks: onStatus(func(ctx context.Context, to client.Client, c *extensions.SandboxClaim) (err error) {
		once.Do(func() {
			err = client.IgnoreNotFound(to.Delete(ctx, c.DeepCopy()))
			named <- c.Status.Sandbox.Name
		})
		return err
	})})
	w.pool(w.template(), 1)
	w.claim("c")
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: <-named}}
	if s.Name == "" {
		t.Fatal("the first status names no sandbox")
	}
	w.gone(s)
}

// kill serves a claim up to the write of its status, and kills the controller there. It returns
// the claim, and the sandbox that it owns and does not name.
func kill(t *testing.T, cfg *Config, update func(*fixture)) (*fixture, *extensions.SandboxClaim, *agents.Sandbox) {
	t.Helper()
	killed := make(chan struct{})
	var once sync.Once
	first := start(t, cfg, options{hooks: onStatus(func(ctx context.Context, _ client.Client, _ *extensions.SandboxClaim) error {
		once.Do(func() { close(killed) })
		<-ctx.Done()
		return ctx.Err()
	})})
	first.pool(first.template(), 2)
	c := first.claim("c")
	select {
	case <-killed:
	case <-time.After(eventually.Patience):
		t.Fatal("the controller never came to the status")
	}
	first.stop()
	all := first.owned(c)
	if len(all) != 1 {
		t.Fatalf("%d sandboxes were taken, want 1", len(all))
	}
	if update != nil {
		update(first)
	}
	return start(t, cfg, options{namespace: first.namespace}), c, &all[0]
}

func killed(t *testing.T, cfg *Config) {
	w, c, taken := kill(t, cfg, nil)
	c, s := w.served(c)
	if s.UID != taken.UID {
		t.Errorf("the claim got %s although it owned %s", s.Name, taken.Name)
	}
	w.served(w.claim("another")) // so that the first is done with
	if all := w.owned(c); len(all) != 1 {
		t.Errorf("the claim owns %d sandboxes", len(all))
	}
}

func killedUpdated(t *testing.T, cfg *Config) {
	revision := ""
	w, c, taken := kill(t, cfg, func(w *fixture) {
		x := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: templateName}}
		x = update(w, x, image("second"))
		var err error
		revision, _, err = pool.Revision(x)
		must(t, err)
	})
	_, s := w.served(c)
	if s.UID == taken.UID || pool.RevisionOf(s) != revision {
		t.Errorf("the claim got %s of revision %s, want one of %s", s.Name, pool.RevisionOf(s), revision)
	}
	w.gone(taken)
}

func image(name string) func(*extensions.SandboxTemplate) {
	return func(x *extensions.SandboxTemplate) { x.Spec.PodTemplate.Spec.Containers[0].Image = name }
}

// coldUpdated updates the template while a sandbox starts for a claim.
func coldUpdated(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.nodes.Holding(func(s *agents.Sandbox) bool { return s.DeletionTimestamp == nil })
	x := w.template()
	w.pool(x, 0)
	c := w.claim("c")
	w.refused(c, extensions.ReasonSandboxCreatePending, "starts cold")
	old := w.owned(c)
	if len(old) != 1 {
		t.Fatalf("the claim owns %d sandboxes", len(old))
	}
	x = update(w, x, image("second"))
	w.gone(&old[0])
	w.nodes.Holding(nil)
	_, s := w.served(c)
	if want, _, err := pool.Revision(x); err != nil || pool.RevisionOf(s) != want {
		t.Errorf("the claim got revision %s, want %s (%v)", pool.RevisionOf(s), want, err)
	}
}

// updatedUnderClaims updates the template in place while 200 claims arrive; stale members stay
// for long. What was claimed after the update, as the API server numbers its writes, is current.
func updatedUnderClaims(t *testing.T, cfg *Config) {
	const many, members = 200, 60
	w := start(t, cfg, options{})
	x := w.template()
	p := w.pool(x, members)
	w.nodes.Holding(func(s *agents.Sandbox) bool { return s.DeletionTimestamp != nil })
	claims := make([]*extensions.SandboxClaim, many)
	begun, updated := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: fmt.Sprintf("c%d", i)}}
				c.Spec.WarmPoolRef.Name = poolName
				if err := w.api.Create(t.Context(), c); err != nil {
					t.Error(err)
				}
				claims[i] = c
			}
		})
	}
	wg.Go(func() {
		for i := range many {
			switch i {
			case many / 5:
				close(begun)
			case many / 2: // enough are left to come after the update
				<-updated
			}
			next <- i
		}
		close(next)
	})
	<-begun
	x = update(w, x, image("second"))
	close(updated)
	w.grow(p, x, members)
	wg.Wait()
	w.deleteStale(p, x)
	judgeClaims(w, x, claims)
	w.nodes.Holding(nil)
}

// deleteStale deletes the members that are not of the template's revision.
func (w *fixture) deleteStale(p *extensions.SandboxWarmPool, x *extensions.SandboxTemplate) {
	w.t.Helper()
	current, _, err := pool.Revision(x)
	must(w.t, err)
	var list agents.SandboxList
	must(w.t, w.api.List(w.t.Context(), &list, client.InNamespace(w.namespace), client.MatchingLabels{agents.LabelWarmPoolSandbox: string(p.UID)}))
	for i := range list.Items {
		s := &list.Items[i]
		if pool.RevisionOf(s) == current {
			continue
		}
		err := w.api.Delete(w.t.Context(), s, client.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion})
		if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			w.t.Error(err)
		}
	}
}

func judgeClaims(w *fixture, x *extensions.SandboxTemplate, claims []*extensions.SandboxClaim) {
	t := w.t
	t.Helper()
	current, _, err := pool.Revision(x)
	must(t, err)
	updated, err := strconv.ParseUint(x.ResourceVersion, 10, 64)
	must(t, err)
	got, after, stale := map[string]string{}, 0, 0
	launches := map[string]int{}
	for _, c := range claims {
		at, err := strconv.ParseUint(c.ResourceVersion, 10, 64)
		must(t, errors.Join(err, t.Context().Err()))
		_, s := w.served(c)
		if other := got[s.Name]; other != "" {
			t.Errorf("sandbox %s went to the claims %s and %s", s.Name, other, c.Name)
		}
		got[s.Name] = c.Name
		launches[s.Labels[agents.LabelLaunchType]]++
		if at > updated {
			after++
			if pool.RevisionOf(s) != current {
				stale++
			}
		}
	}
	t.Logf("%d claims, %d of them after the update; launched %v", len(claims), after, launches)
	if after < len(claims)/4 || stale > 0 {
		t.Errorf("of %d claims made after the update %d got a stale sandbox", after, stale)
	}
}
