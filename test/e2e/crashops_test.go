package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// subject is what an operation acts on.
type subject struct {
	oldKey []byte // of Secrets
	name   string // of the claim, and the idempotency key
	id     string
	nonce  string
	served int
	// several means that a sidecar has a witness too, whose nonce is part of nonce.
	several bool
	hook    *hookReceiver // of a webhook alone
}

var subjectNumber atomic.Int64

func newSubject(kind string) *subject {
	return &subject{name: fmt.Sprintf("%s-%d", kind, subjectNumber.Add(1))}
}

// operation is a request to the server.
type operation struct {
	name string
	// storeAfter is how long a paused sandbox stays in RAM during the operation.
	storeAfter string
	// prepare makes what the operation acts on.
	prepare func(w *fixture) *subject
	// do requests it and waits until it is done. The caller retries after an error.
	do func(ctx context.Context, w *fixture, s *subject) error
	// check verifies that it is done, once.
	check func(w *fixture, s *subject)
	// cleanup removes the subject.
	cleanup func(w *fixture, s *subject)
}

const (
	soonOnDisk  = "50ms"
	neverOnDisk = "0s"
)

var (
	cold = operation{
		name: "cold create", storeAfter: neverOnDisk, prepare: newSubjectOf("cold"),
		do:    create("cold"),
		check: func(w *fixture, s *subject) { w.checkCreated(s) }, cleanup: killSubject,
	}
	prepared = operation{ // with init containers and a volume of a Secret
		name: "create with init containers", storeAfter: neverOnDisk, prepare: newSubjectOf("prepared"),
		do: create("prepared"),
		check: func(w *fixture, s *subject) {
			w.checkCreated(s)
			if got := w.exec(s.id, "cat /work/made"); got != "by-init" {
				w.t.Errorf("the init container left %q", got)
			}
		}, cleanup: killSubject,
	}
	warm = operation{
		name: "warm create", storeAfter: neverOnDisk, prepare: newSubjectOf("warm"),
		do:    create("warm"),
		check: func(w *fixture, s *subject) { w.checkCreated(s) }, cleanup: killSubject,
	}
	claimObject = operation{
		name: "claim object", storeAfter: neverOnDisk, prepare: newSubjectOf("claim"),
		do:    claimOf("warm-pool"),
		check: func(w *fixture, s *subject) { w.meet(s.id) }, cleanup: removeClaim,
	}
	coldClaimObject = operation{
		name: "cold claim object", storeAfter: neverOnDisk, prepare: newSubjectOf("claim"),
		do:    claimOf("rare-pool"),
		check: func(w *fixture, s *subject) { w.meet(s.id) }, cleanup: removeClaim,
	}
	endClaimObject = operation{
		name: "end of a claim object", storeAfter: neverOnDisk,
		prepare: func(w *fixture) *subject {
			s := newSubject("claim")
			w.need(claimObject.do(w.t.Context(), w, s))
			return s
		},
		do: endClaim, check: func(w *fixture, s *subject) { w.gone(s.id) }, cleanup: removeClaim,
	}
	freeze = operation{
		name: "freeze", storeAfter: neverOnDisk, prepare: claimedSandbox, do: pauseSubject,
		check: func(w *fixture, s *subject) { w.checkSleeps(s); w.checkResumes(s) }, cleanup: killSubject,
	}
	store = operation{
		name: "store", storeAfter: soonOnDisk, prepare: claimedSandbox, do: pauseSubject,
		check: func(w *fixture, s *subject) { w.checkSleeps(s); w.stored(s.id); w.checkResumes(s) }, cleanup: killSubject,
	}
	thaw = operation{
		name: "thaw", storeAfter: neverOnDisk,
		prepare: func(w *fixture) *subject {
			s := claimedSandbox(w)
			w.need(pauseSubject(w.t.Context(), w, s))
			return s
		},
		do: resumeSubject, check: func(w *fixture, s *subject) { w.checkResumes(s) }, cleanup: killSubject,
	}
	wake = operation{
		name: "wake", storeAfter: soonOnDisk, prepare: pausedSandbox,
		do: resumeSubject, check: func(w *fixture, s *subject) { w.checkResumes(s) }, cleanup: killSubject,
	}
	restart = operation{
		name: "restart", storeAfter: neverOnDisk, prepare: claimedFrom("again"), do: exitOf,
		check: func(w *fixture, s *subject) {
			if nonce, _ := w.meet(s.id); nonce == s.nonce {
				w.t.Errorf("the program of %s was not restarted", s.id)
			}
		}, cleanup: killSubject,
	}
	finish = operation{
		name: "finish", storeAfter: neverOnDisk, prepare: claimedFrom("once"), do: exitOf,
		check: func(w *fixture, s *subject) {
			if p := sandbox.PhaseOf(w.object(s.id)); p != sandbox.Dead {
				w.t.Errorf("sandbox %s is %s", s.id, p)
			}
		}, cleanup: func(w *fixture, s *subject) { w.removeObject(s.id) },
	}
	kill = operation{
		name: "kill", storeAfter: neverOnDisk, prepare: claimedSandbox, do: killOf,
		check: func(w *fixture, s *subject) { w.gone(s.id) }, cleanup: nothingLeft,
	}
	killStored = operation{
		name: "kill of a paused sandbox", storeAfter: soonOnDisk, prepare: pausedSandbox, do: killOf,
		check: func(w *fixture, s *subject) { w.gone(s.id) }, cleanup: nothingLeft,
	}
	shrink = operation{
		name: "shrinking pool", storeAfter: neverOnDisk, prepare: newSubjectOf("pool"),
		do:    func(ctx context.Context, w *fixture, _ *subject) error { return w.resize(ctx, fixtureMembers-1) },
		check: func(w *fixture, _ *subject) { w.calm() },
		cleanup: func(w *fixture, _ *subject) {
			eventually.NoError(w.t, "the pool grows", func() error { return w.resize(w.t.Context(), fixtureMembers) })
		},
	}
)

func (w *fixture) need(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf("%v\n%s", err, w.tail())
	}
}

func newSubjectOf(kind string) func(*fixture) *subject {
	return func(*fixture) *subject { return newSubject(kind) }
}

// claimedSandbox is a claimed sandbox.
func claimedSandbox(w *fixture) *subject { return claimedFrom("warm")(w) }

func claimedFrom(template string) func(*fixture) *subject {
	return func(w *fixture) *subject {
		w.t.Helper()
		s := newSubject(template)
		s.several = template == "prepared"
		w.need(create(template)(w.t.Context(), w, s))
		s.nonce, s.served = w.meetAll(s.id, s)
		return s
	}
}

func pausedSandbox(w *fixture) *subject {
	s := claimedSandbox(w)
	w.need(pauseSubject(w.t.Context(), w, s))
	w.stored(s.id)
	return s
}

func nothingLeft(*fixture, *subject) {}

// create requests a sandbox under an idempotency key.
func create(template string) func(context.Context, *fixture, *subject) error {
	return func(ctx context.Context, w *fixture, s *subject) error {
		var made struct{ SandboxID string }
		_, err := w.send(ctx, http.MethodPost, "/sandboxes", s.name, map[string]any{
			"templateID": template, "timeout": 3600, "secure": true,
			"envVars": map[string]string{"WHO": s.name}, "metadata": map[string]string{"owner": s.name},
		}, &made)
		if err == nil {
			s.id = made.SandboxID
		}
		return err
	}
}

func (w *fixture) checkCreated(s *subject) {
	w.t.Helper()
	w.meet(s.id)
	if got := w.exec(s.id, "echo $WHO"); got != s.name {
		w.t.Errorf("the sandbox of %s has the variable of %q", s.name, got)
	}
	x := w.object(s.id)
	if x.Spec.Barchan.Metadata["owner"] != s.name || x.Spec.ShutdownTime == nil || time.Until(x.Spec.ShutdownTime.Time) < 500*time.Second {
		w.t.Errorf("the sandbox of %s: metadata %v, end %v", s.name, x.Spec.Barchan.Metadata, x.Spec.ShutdownTime)
	}
}

func killOf(ctx context.Context, w *fixture, s *subject) error {
	status, err := w.send(ctx, http.MethodDelete, "/sandboxes/"+s.id, "", nil, nil)
	if status == http.StatusNotFound {
		return nil
	}
	return err
}

func killSubject(w *fixture, s *subject) {
	w.t.Helper()
	w.need(killOf(w.t.Context(), w, s))
	w.gone(s.id)
}

func pauseSubject(ctx context.Context, w *fixture, s *subject) error {
	status, err := w.send(ctx, http.MethodPost, "/sandboxes/"+s.id+"/pause", "", nil, nil)
	if status == http.StatusConflict && strings.Contains(err.Error(), "already paused") {
		return nil
	}
	return err
}

func resumeSubject(ctx context.Context, w *fixture, s *subject) error {
	_, err := w.send(ctx, http.MethodPost, "/sandboxes/"+s.id+"/connect", "", map[string]any{"timeout": 3600}, nil)
	return err
}

// checkSleeps waits until a sandbox is paused.
func (w *fixture) checkSleeps(s *subject) {
	w.t.Helper()
	eventually.NoError(w.t, "sandbox "+s.id+" is stored", func() error {
		if p := sandbox.PhaseOf(w.object(s.id)); p != sandbox.Paused {
			return fmt.Errorf("it is %s", p)
		}
		return nil
	})
}

// checkResumes verifies that a sandbox continues where it was.
func (w *fixture) checkResumes(s *subject) {
	w.t.Helper()
	eventually.NoError(w.t, "sandbox "+s.id+" resumes", func() error { return resumeSubject(w.t.Context(), w, s) })
	nonce, served := w.meet(s.id)
	if nonce != s.nonce || served <= s.served {
		w.t.Errorf("sandbox %s returned %s, %d; before: %s, %d", s.id, nonce, served, s.nonce, s.served)
	}
}

var errAgain = errors.New("not yet")

// exitOf has the program of a sandbox end, and waits for what comes of it.
func exitOf(ctx context.Context, w *fixture, s *subject) error {
	nonce, _, err := w.query(s.id) //nolint:contextcheck // it has a timeout of its own
	switch {
	case err == nil && nonce != s.nonce:
		return nil
	case err == nil:
		_, _, _ = w.visit(s.id, witnessPort, "/exit") //nolint:contextcheck // it has a time of its own
		return errAgain
	}
	var seen struct{ State string }
	if status, err := w.send(ctx, http.MethodGet, "/sandboxes/"+s.id, "", nil, &seen); status != http.StatusNotFound {
		return errors.Join(errAgain, err)
	}
	return nil
}

// claimOf makes a SandboxClaim and waits for its sandbox.
func claimOf(pool string) func(context.Context, *fixture, *subject) error {
	return func(ctx context.Context, w *fixture, s *subject) error {
		c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}}
		c.Spec.WarmPoolRef.Name = pool
		if err := w.objects.Create(ctx, c); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		for {
			if err := w.objects.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
				return err
			}
			if meta.IsStatusConditionTrue(c.Status.Conditions, agents.ConditionReady) {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%w: %+v", ctx.Err(), c.Status)
			case <-time.After(20 * time.Millisecond):
			}
		}
		var x agents.Sandbox
		if err := w.objects.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: c.Status.Sandbox.Name}, &x); err != nil {
			return err
		}
		s.id = idOf(&x)
		return nil
	}
}

// endClaim has the time of a claim be over.
func endClaim(ctx context.Context, w *fixture, s *subject) error {
	c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}}
	patch := fmt.Sprintf(`{"spec":{"lifecycle":{"shutdownTime":%q,"shutdownPolicy":"Retain"}}}`, time.Now().Add(-time.Second).UTC().Format(time.RFC3339))
	return w.objects.Patch(ctx, c, client.RawPatch("application/merge-patch+json", []byte(patch)))
}

func removeClaim(w *fixture, s *subject) {
	w.t.Helper()
	w.need(deleteClaim(w.t.Context(), w, s))
	w.gone(s.id)
}

func deleteClaim(ctx context.Context, w *fixture, s *subject) error {
	c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}}
	return client.IgnoreNotFound(w.objects.Delete(ctx, c))
}

// resize changes how many members the pool is to have.
func (w *fixture) resize(ctx context.Context, members int) error {
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "warm-pool"}}
	return w.objects.Patch(ctx, p, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, members)))
}
