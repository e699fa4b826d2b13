package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// crashSnapshots is the name of all snapshots of these operations; the subject's name is the tag.
const crashSnapshots = "crash"

// snapshotOf is the ID of the snapshot that an operation makes.
func snapshotOf(s *subject) string { return crashSnapshots + ":" + s.name }

var (
	takeSnapshot = operation{
		name: "snapshot", storeAfter: neverOnDisk, prepare: claimedSandbox, do: snapshotSubject,
		check: func(w *fixture, s *subject) { w.checkSnapshot(s); w.checkContinues(s) }, cleanup: dropAndKill,
	}
	takeSnapshotAsleep = operation{
		name: "snapshot of a paused sandbox", storeAfter: soonOnDisk, prepare: pausedSandbox, do: snapshotSubject,
		check: func(w *fixture, s *subject) { w.checkSleeps(s); w.checkSnapshot(s); w.checkResumes(s) }, cleanup: dropAndKill,
	}
	takeAndSuspend = operation{
		name: "checkpoint that suspends", storeAfter: neverOnDisk, prepare: claimedSandbox, do: checkpointSubject,
		check: func(w *fixture, s *subject) { w.checkSleeps(s); w.checkResumes(s) }, cleanup: dropAndKill,
	}
	dropSnapshot = operation{
		name: "delete of a snapshot", storeAfter: neverOnDisk, prepare: snapshotted("warm"), do: dropSubject,
		check: func(w *fixture, s *subject) { w.noCheckpoint(); w.checkContinues(s) }, cleanup: killSubject,
	}
	startFromSnapshot = operation{
		name: "create from a snapshot", storeAfter: neverOnDisk,
		prepare: snapshotAlone("warm"), do: createFromSnapshot,
		check: (*fixture).checkNonce, cleanup: dropAndKill,
	}
	startSeveralFromSnapshot = operation{
		name: "create of several containers from a snapshot", storeAfter: neverOnDisk,
		prepare: snapshotAlone("prepared"), do: createFromSnapshot,
		check: (*fixture).checkNonce, cleanup: dropAndKill,
	}
	snapshotOfSeveral = operation{
		name: "snapshot of several containers", storeAfter: neverOnDisk, prepare: claimedFrom("prepared"), do: snapshotSubject,
		check: func(w *fixture, s *subject) { w.checkSnapshot(s); w.checkContinues(s) }, cleanup: dropAndKill,
	}
	dropSnapshotOfSeveral = operation{
		name: "delete of a snapshot of several containers", storeAfter: neverOnDisk, prepare: snapshotted("prepared"), do: dropSubject,
		check: func(w *fixture, s *subject) { w.noCheckpoint(); w.checkContinues(s) }, cleanup: killSubject,
	}
	forkSandbox = forkOf("fork", "warm")
	forkSeveral = forkOf("fork of several containers", "prepared")
	warmUp      = operation{
		name: "warm-up", storeAfter: neverOnDisk, prepare: newSubjectOf("warmup"), do: warmUpPool,
		check: func(w *fixture, s *subject) {
			w.need(createOf(w.t.Context(), w, s, s.name))
			w.meet(s.id)
		},
		cleanup: func(w *fixture, s *subject) {
			if s.id != "" {
				killSubject(w, s)
			}
			for _, o := range []client.Object{&extensions.SandboxWarmPool{}, &extensions.SandboxTemplate{}} {
				o.SetNamespace("default")
				o.SetName(s.name)
				w.need(client.IgnoreNotFound(w.objects.Delete(w.t.Context(), o)))
			}
			w.noCheckpoint()
		},
	}
)

// forkOf forks a sandbox of a template.
func forkOf(name, template string) operation {
	return operation{
		name: name, storeAfter: neverOnDisk, prepare: claimedFrom(template), do: forkSubject,
		check: func(w *fixture, s *subject) {
			// A repeated fork request makes further forks.
			for _, id := range w.subjects() {
				if id == s.id {
					continue
				}
				if nonce, _ := w.meetAll(id, s); nonce != s.nonce {
					w.t.Errorf("fork %s returned %s, its source returned %s", id, nonce, s.nonce)
				}
				w.removeObject(id)
			}
			w.checkContinues(s)
		}, cleanup: dropAndKill,
	}
}

func snapshotSubject(ctx context.Context, w *fixture, s *subject) error {
	status, err := w.send(ctx, http.MethodPost, "/sandboxes/"+s.id+"/snapshots", "", map[string]any{"name": snapshotOf(s)}, nil)
	if status != http.StatusConflict {
		return err
	}
	// An earlier request may have made it.
	var list []struct{ SnapshotID string }
	if _, err := w.send(ctx, http.MethodGet, "/snapshots?name="+url.QueryEscape(snapshotOf(s)), "", nil, &list); err != nil || len(list) != 1 {
		return errors.Join(errAgain, err)
	}
	return nil
}

// snapshotted makes a sandbox of a template, and its snapshot.
func snapshotted(template string) func(*fixture) *subject {
	return func(w *fixture) *subject {
		s := claimedFrom(template)(w)
		w.need(snapshotSubject(w.t.Context(), w, s))
		return s
	}
}

// snapshotAlone makes a snapshot whose source is gone.
func snapshotAlone(template string) func(*fixture) *subject {
	return func(w *fixture) *subject {
		source := snapshotted(template)(w)
		killSubject(w, source)
		return &subject{name: source.name, nonce: source.nonce, several: source.several}
	}
}

func createFromSnapshot(ctx context.Context, w *fixture, s *subject) error {
	return createOf(ctx, w, s, snapshotOf(s))
}

// dropSubject deletes the snapshot of a subject; a missing one is success.
func dropSubject(ctx context.Context, w *fixture, s *subject) error {
	status, err := w.send(ctx, http.MethodDelete, "/templates/"+url.PathEscape(snapshotOf(s)), "", nil, nil)
	if status == http.StatusNotFound {
		return nil
	}
	return err
}

// checkpointSubject makes a Checkpoint object that suspends its source.
func checkpointSubject(ctx context.Context, w *fixture, s *subject) error {
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name, Finalizers: []string{barchan.NodeFinalizer}}}
	x, err := w.find(ctx, s.id)
	if err != nil {
		return err
	}
	c.Spec.SandboxName = x.Name
	barchan.SetCheckpointDefaults(c)
	if err := w.objects.Create(ctx, c); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	for {
		if err := w.objects.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
			return err
		}
		switch c.Status.Phase {
		case barchan.CheckpointReady:
			return nil
		case barchan.CheckpointPending, barchan.CheckpointWriting:
		case barchan.CheckpointFailed:
			return fmt.Errorf("checkpoint %s: %+v", c.Name, c.Status.Conditions)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func forkSubject(ctx context.Context, w *fixture, s *subject) error {
	var all []forked
	if _, err := w.send(ctx, http.MethodPost, "/sandboxes/"+s.id+"/fork", "", map[string]any{"count": 2, "timeout": 3600, "allowSecrets": true}, &all); err != nil {
		return err
	}
	for _, f := range all {
		if f.Sandbox == nil {
			return fmt.Errorf("a fork failed: %+v", f.Error)
		}
	}
	return nil
}

// createOf makes a sandbox from a template or a snapshot, under an idempotency key. A
// subject holds what its create brought, and so does its snapshot.
func createOf(ctx context.Context, w *fixture, s *subject, of string) error {
	var got made
	body := map[string]any{"templateID": of, "timeout": 3600, "secure": true}
	if strings.Contains(of, ":") {
		body["allowSecrets"] = true
	}
	if _, err := w.send(ctx, http.MethodPost, "/sandboxes", s.name, body, &got); err != nil {
		return err
	}
	s.id = got.SandboxID
	return nil
}

// warmUpPool makes a template with a warm-up, and a pool of it, and waits until that is full.
func warmUpPool(ctx context.Context, w *fixture, s *subject) error {
	code, err := json.Marshal(witness)
	if err != nil {
		return err
	}
	template := strings.Replace(fmt.Sprintf(fixtureTemplate, s.name, "", code), "  podTemplate:", "  barchan: {sandbox: {warmUp: {command: [touch, /tmp/warm]}}}\n  podTemplate:", 1)
	if out, err := w.tryIn(template+fmt.Sprintf(fixturePool, s.name, 1, s.name), "apply", "-f", "-"); err != nil { //nolint:contextcheck // it has a time of its own
		return fmt.Errorf("apply: %w\n%s", err, out)
	}
	for {
		var p extensions.SandboxWarmPool
		if err := w.objects.Get(ctx, client.ObjectKey{Namespace: "default", Name: s.name}, &p); err != nil {
			return err
		}
		if p.Status.ReadyReplicas == 1 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %+v", ctx.Err(), p.Status)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// checkSnapshot starts a sandbox from the snapshot of a subject, and removes it.
func (w *fixture) checkSnapshot(s *subject) {
	w.t.Helper()
	x := newSubject("from")
	eventually.NoError(w.t, "a sandbox starts from "+snapshotOf(s), func() error { return createOf(w.t.Context(), w, x, snapshotOf(s)) })
	x.nonce, x.several = s.nonce, s.several
	w.checkNonce(x)
	killSubject(w, x)
}

// checkNonce verifies that a subject has the processes of its origin.
func (w *fixture) checkNonce(s *subject) {
	w.t.Helper()
	if nonce, _ := w.meetAll(s.id, s); nonce != s.nonce {
		w.t.Errorf("sandbox %s returned %s, want %s", s.id, nonce, s.nonce)
	}
}

// checkContinues verifies that a subject's processes continue.
func (w *fixture) checkContinues(s *subject) {
	w.t.Helper()
	nonce, served := w.meetAll(s.id, s)
	if nonce != s.nonce || served <= s.served {
		w.t.Errorf("sandbox %s returned %s, %d; before: %s, %d", s.id, nonce, served, s.nonce, s.served)
	}
}

// dropAndKill removes a subject, and all checkpoints.
func dropAndKill(w *fixture, s *subject) {
	w.t.Helper()
	killSubject(w, s)
	w.need(w.objects.DeleteAllOf(w.t.Context(), &barchan.Checkpoint{}, client.InNamespace("default")))
	w.noCheckpoint()
}

// noCheckpoint waits until there is none.
func (w *fixture) noCheckpoint() {
	w.t.Helper()
	eventually.NoError(w.t, "no checkpoint is left", func() error {
		var list barchan.CheckpointList
		if err := w.objects.List(w.t.Context(), &list); err != nil {
			return err
		}
		if len(list.Items) > 0 {
			return fmt.Errorf("checkpoint %s: %+v", list.Items[0].Name, list.Items[0].Status.Conditions)
		}
		return nil
	})
}
