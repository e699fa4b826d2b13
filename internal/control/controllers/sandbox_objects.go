package controllers

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// References finds sandboxes by what they refer to; package cache implements it.
type References interface {
	// Referring returns the sandboxes of a namespace that refer to an object of it.
	Referring(ctx context.Context, kind string, key types.NamespacedName) ([]*agents.Sandbox, error)
	// Watchable returns what to watch for the metadata of an object.
	Watchable(o client.Object) client.Object
}

func isMissing(err error) bool {
	_, is := errors.AsType[*podsource.Missing](err)
	return is
}

// awaitObject writes to the status which object or key a sandbox waits for. The event of the object reconciles it
// again, so nothing is retried before.
func (r *sandboxReconciler) awaitObject(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed, cause error) error {
	missing, _ := errors.AsType[*podsource.Missing](cause)
	status := statusOf(s, seen)
	before := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	if before == nil || before.Reason != missing.Reason || before.Message != missing.Message {
		r.event(s, missing)
		r.Log.InfoContext(ctx, "sandbox waits for an object", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
	}
	setFailure(s, status, missing.Reason, missing.Message, false)
	return r.writeStatus(ctx, s, status)
}

// event records what is missing in kubelet's words.
func (r *sandboxReconciler) event(s *agents.Sandbox, missing *podsource.Missing) {
	if r.Events == nil {
		return
	}
	reason, text := missing.Reason, missing.Message
	if reason == podsource.ReasonConfig {
		reason, text = "Failed", "Error: "+text
	}
	r.Events.Eventf(s, nil, corev1.EventTypeWarning, reason, "Run", "%s", text)
}

// referred enqueues the sandboxes that refer to an object of a kind when it appears, changes or goes. It uses the
// metadata alone: values are read where they are needed.
func (r *sandboxReconciler) referred(kind string, o client.Object) source.Source {
	return Watch(r.Cache, r.References.Watchable(o), func(ctx context.Context, old, now client.Object, q Queue) {
		if now == nil {
			now = old
		}
		all, err := r.References.Referring(ctx, kind, client.ObjectKeyFromObject(now))
		if err != nil {
			r.Log.ErrorContext(ctx, "cannot list sandboxes of object", telemetry.Namespace, now.GetNamespace(), telemetry.Name, now.GetName(), telemetry.Error, err)
		}
		for _, s := range all {
			q.Add(RequestFor(s))
		}
	})
}
