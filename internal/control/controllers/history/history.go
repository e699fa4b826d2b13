// Package history creates a TemplateRevision for each revision of a template, numbered in the order in
// which it observes them. It keeps the newest and the current ones. No component decides by the
// history; it is for users.
//
// A revision that returns keeps its entry and number. Entries are deleted with their template.
package history

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

const (
	// Kept is the number of revisions to keep, plus the current one if it is older.
	Kept = 10
	// named is the length of the revision prefix in an entry's name.
	named = 10
	// maxName is the maximum length of an object name.
	maxName = 253

	workers    = 2
	retryFirst = 200 * time.Millisecond
	retryMost  = time.Minute
)

// Revisions reads the history; package cache implements it.
type Revisions interface {
	TemplateRevisions(ctx context.Context, template types.NamespacedName) ([]barchan.TemplateRevision, error)
}

// Config configures New; every field is required.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server directly.
	Client client.Client
	// Cache provides the watches, and Revisions reads it.
	Cache     crcache.Cache
	Revisions Revisions
}

// New returns the controller of templates' history. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Revisions == nil {
		return nil, fmt.Errorf("history controller: Log, Client, Cache and Revisions are required: %w", errs.ErrInvalid)
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "history-controller")
	return controllers.New(controllers.Work{
		Name: "history", Log: cfg.Log, Workers: workers, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: &reconciler{cfg}, Sources: sources(cfg.Cache),
	})
}

func sources(c crcache.Cache) []source.Source {
	return []source.Source{
		source.Kind(c, &extensions.SandboxTemplate{}, &handler.TypedEnqueueRequestForObject[*extensions.SandboxTemplate]{}),
		// A deleted entry may be that of the current revision.
		controllers.Watch(c, &barchan.TemplateRevision{}, func(_ context.Context, old, now *barchan.TemplateRevision, q controllers.Queue) {
			if now == nil {
				q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: old.Namespace, Name: old.Spec.TemplateName}})
			}
		}),
	}
}

type reconciler struct{ Config }

// Reconcile creates the entry of a new revision and deletes old ones.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	t := &extensions.SandboxTemplate{}
	if err := r.Client.Get(ctx, req.NamespacedName, t); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if t.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	revision, content, err := pool.Revision(t)
	if err != nil {
		return reconcile.Result{}, reconcile.TerminalError(err)
	}
	known, err := r.Revisions.TemplateRevisions(ctx, req.NamespacedName)
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("read the history of template %s: %w", req.NamespacedName, err)
	}
	if known = of(t, known); !slices.ContainsFunc(known, is(revision)) {
		if known, err = r.live(ctx, t); err != nil { // the cache may lag, and numbers must differ
			return reconcile.Result{}, err
		}
	}
	if !slices.ContainsFunc(known, is(revision)) {
		entry, err := r.write(ctx, t, revision, content, known)
		if apierrors.IsAlreadyExists(err) {
			// The entry of a deleted template of this name, until it is deleted too; or of a longer name.
			return reconcile.Result{}, fmt.Errorf("write revision of template %s: its name is taken: %w", req.NamespacedName, err)
		} else if err != nil {
			return reconcile.Result{}, err
		}
		known = append(known, *entry)
	}
	return reconcile.Result{}, r.prune(ctx, known, revision)
}

func is(revision string) func(barchan.TemplateRevision) bool {
	return func(r barchan.TemplateRevision) bool {
		return r.Spec.Revision == revision && r.DeletionTimestamp == nil
	}
}

// of filters the entries of this template by UID.
func of(t *extensions.SandboxTemplate, all []barchan.TemplateRevision) []barchan.TemplateRevision {
	return slices.DeleteFunc(all, func(r barchan.TemplateRevision) bool {
		return r.Spec.TemplateName != t.Name || !metav1.IsControlledBy(&r, t)
	})
}

func (r *reconciler) live(ctx context.Context, t *extensions.SandboxTemplate) ([]barchan.TemplateRevision, error) {
	var list barchan.TemplateRevisionList
	if err := r.Client.List(ctx, &list, client.InNamespace(t.Namespace)); err != nil {
		return nil, fmt.Errorf("list the history of template %s/%s: %w", t.Namespace, t.Name, err)
	}
	return of(t, list.Items), nil
}

// write creates an entry; it fails if the name exists.
func (r *reconciler) write(ctx context.Context, t *extensions.SandboxTemplate, revision string, content []byte, known []barchan.TemplateRevision) (*barchan.TemplateRevision, error) {
	entry := &barchan.TemplateRevision{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: t.Namespace, Name: nameOf(t.Name, revision),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(t, extensions.GroupVersion.WithKind("SandboxTemplate"))},
		},
		Spec: barchan.TemplateRevisionSpec{TemplateName: t.Name, Revision: revision, Number: 1, Content: runtime.RawExtension{Raw: content}},
	}
	for _, k := range known {
		entry.Spec.Number = max(entry.Spec.Number, k.Spec.Number+1)
	}
	if err := r.Client.Create(ctx, entry); err != nil {
		return nil, fmt.Errorf("write revision %d of template %s/%s: %w", entry.Spec.Number, t.Namespace, t.Name, err)
	}
	r.Log.InfoContext(ctx, "template has a new revision", telemetry.Namespace, t.Namespace, telemetry.Template, t.Name, telemetry.Revision, revision, "number", entry.Spec.Number)
	return entry, nil
}

// nameOf returns the name of a revision's entry.
func nameOf(template, revision string) string {
	revision = revision[:min(named, len(revision))]
	template = template[:min(len(template), maxName-1-len(revision))]
	return strings.TrimRight(template, "-.") + "-" + revision
}

// prune deletes the oldest entries beyond Kept.
func (r *reconciler) prune(ctx context.Context, known []barchan.TemplateRevision, current string) error {
	slices.SortFunc(known, func(a, b barchan.TemplateRevision) int { return cmp.Compare(b.Spec.Number, a.Spec.Number) })
	for i, k := range known {
		if i < Kept || k.Spec.Revision == current || k.DeletionTimestamp != nil {
			continue
		}
		same := client.Preconditions{UID: &k.UID, ResourceVersion: &k.ResourceVersion}
		if err := r.Client.Delete(ctx, &k, same); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete revision %d of template %s/%s: %w", k.Spec.Number, k.Namespace, k.Spec.TemplateName, err)
		}
	}
	return nil
}
