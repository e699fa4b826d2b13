package app

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// AnyState is the filter of a list of all sandboxes.
func AnyState() []string { return []string{client.StateRunning, client.StatePaused} }

// Find returns the one sandbox of a text: the whole ID first, then the name in the key's namespace,
// then a unique prefix of an ID.
func (t *Server) Find(ctx context.Context, text string) (client.SandboxDetail, error) {
	id, notID := sandbox.ParseID(text)
	gone := fmt.Errorf("no sandbox has the name %q, or an ID that begins so; `barchan ls` lists them: %w", text, errs.ErrNotFound)
	if notID == nil {
		d, err := t.REST.Get(ctx, string(id))
		if !errors.Is(err, errs.ErrNotFound) {
			return d, err
		}
		gone = err // the API may return why it ended
	}
	found, err := t.search(ctx, text)
	switch {
	case err != nil:
		return client.SandboxDetail{}, err
	case found == "":
		return client.SandboxDetail{}, gone
	}
	return t.REST.Get(ctx, found)
}

// Resolve returns the ID of the sandbox that Find finds. A whole ID is returned even if no sandbox has
// it: the API's routes report that.
func (t *Server) Resolve(ctx context.Context, text string) (string, error) {
	d, err := t.Find(ctx, text)
	if id, notID := sandbox.ParseID(text); notID == nil && errors.Is(err, errs.ErrNotFound) {
		return string(id), nil
	}
	return d.SandboxID, err
}

// search returns the ID of the sandbox of a name, or of the only one whose ID begins with text; empty:
// none.
func (t *Server) search(ctx context.Context, text string) (string, error) {
	if text == "" {
		return "", nil
	}
	named, err := t.REST.List(ctx, client.ListOptions{States: AnyState(), Name: text})
	if err != nil {
		return "", err
	}
	// Other servers of this API ignore the filter, and list all.
	if at := slices.IndexFunc(named, func(s client.SandboxInfo) bool { return s.Name == text }); at >= 0 {
		return named[at].SandboxID, nil
	}
	all, err := t.REST.List(ctx, client.ListOptions{States: AnyState()})
	var begin []string
	for _, s := range all {
		if strings.HasPrefix(s.SandboxID, text) {
			begin = append(begin, s.SandboxID)
		}
	}
	switch {
	case err != nil || len(begin) == 0:
		return "", err
	case len(begin) > 1:
		slices.Sort(begin)
		return "", fmt.Errorf("%q begins the IDs of %d sandboxes; give more of one: %s: %w", text, len(begin), strings.Join(begin, ", "), errs.ErrInvalid)
	}
	return begin[0], nil
}

// Kind is a resource of the Kubernetes API with its names for users.
type Kind struct {
	schema.GroupVersionResource
	Noun string
	// ID returns an object's ID, which it has beside its name.
	ID func(metav1.Object) string
	// isID reports whether a text may be such an ID.
	isID func(text string) bool
}

// TemplateKind is for templates: their ID is the REST API's.
func TemplateKind() Kind {
	return Kind{TemplatesResource, "template", func(o metav1.Object) string {
		return pool.TemplateID(&extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{
			Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID(), Annotations: o.GetAnnotations(),
		}})
	}, likeSandboxID}
}

// PoolKind gives pools IDs like those of sandboxes and templates; the APIs have none.
func PoolKind() Kind {
	return Kind{PoolsResource, "pool", func(o metav1.Object) string { return "p" + string(sandbox.IDOf(o.GetUID()))[1:] }, likeSandboxID}
}

// KeyKind is for API keys: their ID is the UID.
func KeyKind() Kind {
	return Kind{KeysResource, "key", func(o metav1.Object) string { return string(o.GetUID()) }, func(text string) bool {
		return uuid.Validate(text) == nil
	}}
}

// CheckpointKind is for snapshots as objects: their ID is the REST API's.
func CheckpointKind() Kind {
	return Kind{CheckpointsResource, "snapshot", func(o metav1.Object) string {
		return (&barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), Labels: o.GetLabels()}}).SnapshotID()
	}, func(text string) bool { return strings.Contains(text, ":") }}
}

func likeSandboxID(text string) bool {
	_, err := sandbox.ParseID(text)
	return err == nil
}

// nameOf returns the name of an object in a namespace: the object of the ID, else the name itself,
// which need not exist.
func (k *Kube) nameOf(ctx context.Context, of Kind, namespace, text string) (string, error) {
	if name, tag, tagged := strings.Cut(text, ":"); tagged && of.GroupVersionResource == TemplatesResource {
		return extensions.TagObject(name, tag), nil
	}
	if !of.isID(text) {
		return text, nil
	}
	list, err := k.Client.Resource(of.GroupVersionResource).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", kubeobjects.Error(err)
	}
	for i := range list.Items {
		if of.ID(&list.Items[i]) == text {
			return list.Items[i].GetName(), nil
		}
	}
	return text, nil
}

// GetNamed reads the object of a text as T.
func GetNamed[T any](ctx context.Context, k *Kube, of Kind, namespace, text string) (T, error) {
	name, err := k.nameOf(ctx, of, namespace, text)
	if err != nil {
		var none T
		return none, err
	}
	v, err := Get[T](ctx, k, of.GroupVersionResource, namespace, name)
	return v, of.Missing(err, namespace, text)
}

// SnapshotObject returns the name of a checkpoint: by the ID, else by the object's name, else the
// newest snapshot of the name.
func (k *Kube) SnapshotObject(ctx context.Context, namespace, text string) (string, error) {
	list, err := List[barchan.Checkpoint](ctx, k, CheckpointsResource, namespace)
	if err != nil {
		return "", err
	}
	var newest *barchan.Checkpoint
	object := ""
	for i := range list {
		c := &list[i]
		name, _ := c.SnapshotName()
		switch {
		case c.SnapshotID() == text:
			return c.Name, nil
		case c.Name == text:
			object = c.Name
		case name == text && c.SnapshotID() != "" && (newest == nil || newest.CreationTimestamp.Before(&c.CreationTimestamp)):
			newest = c
		}
	}
	switch {
	case object != "":
		return object, nil
	case newest != nil:
		return newest.Name, nil
	}
	return "", CheckpointKind().Missing(errs.ErrNotFound, namespace, text)
}

// Missing describes a missing object in the command line's terms.
func (of Kind) Missing(err error, namespace, text string) error {
	if !errors.Is(err, errs.ErrNotFound) {
		return err
	}
	return errs.Public(errs.ErrNotFound, fmt.Sprintf("%s %q not found in namespace %s; `barchan %s ls -A` lists all", of.Noun, text, namespace, of.Noun))
}

// NoSnapshot is the error for a missing snapshot. The API has the word template for it.
func NoSnapshot(text string) error {
	return errs.Public(errs.ErrNotFound, fmt.Sprintf("snapshot %q not found; `barchan snapshot ls` lists them", text))
}

// Taken describes an object whose name is in use in the command line's terms.
func (of Kind) Taken(err error, namespace, name string) error {
	if !errors.Is(err, errs.ErrConflict) {
		return err
	}
	return errs.Public(err, fmt.Sprintf("%s %q already exists in namespace %s", of.Noun, name, namespace))
}

// PublicNamespace has the templates for every namespace.
const PublicNamespace = "barchan-system"

// Template finds a template for a namespace, its own or a public one, by its ID or its name.
func (k *Kube) Template(ctx context.Context, namespace, text string) (extensions.SandboxTemplate, error) {
	t, err := GetNamed[extensions.SandboxTemplate](ctx, k, TemplateKind(), namespace, text)
	if err == nil || !errors.Is(err, errs.ErrNotFound) || namespace == PublicNamespace {
		return t, err
	}
	public, publicErr := GetNamed[extensions.SandboxTemplate](ctx, k, TemplateKind(), PublicNamespace, text)
	switch {
	case publicErr == nil && public.Spec.Barchan != nil && public.Spec.Barchan.Public:
		return public, nil
	case publicErr != nil && !errors.Is(publicErr, errs.ErrNotFound):
		return t, publicErr
	}
	return t, err
}
