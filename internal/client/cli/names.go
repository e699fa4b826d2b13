package cli

import (
	"cmp"
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
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/restclient"
)

// anyState is the filter of a list of all sandboxes.
func anyState() []string { return []string{restclient.StateRunning, restclient.StatePaused} }

// find returns the one sandbox of a text: the whole ID first, then the name in the key's namespace,
// then a unique prefix of an ID.
func (t *target) find(ctx context.Context, text string) (restclient.Detail, error) {
	id, notID := sandbox.ParseID(text)
	gone := fmt.Errorf("no sandbox has the name %q, or an ID that begins so; `barchan ls` lists them: %w", text, errs.ErrNotFound)
	if notID == nil {
		d, err := t.rest.Get(ctx, string(id))
		if !errors.Is(err, errs.ErrNotFound) {
			return d, err
		}
		gone = err // the API may return why it ended
	}
	found, err := t.search(ctx, text)
	switch {
	case err != nil:
		return restclient.Detail{}, err
	case found == "":
		return restclient.Detail{}, gone
	}
	return t.rest.Get(ctx, found)
}

// resolve returns the ID of the sandbox that find finds. A whole ID is returned even if no sandbox has
// it: the API's routes report that.
func (t *target) resolve(ctx context.Context, text string) (string, error) {
	d, err := t.find(ctx, text)
	if id, notID := sandbox.ParseID(text); notID == nil && errors.Is(err, errs.ErrNotFound) {
		return string(id), nil
	}
	return d.SandboxID, err
}

// search returns the ID of the sandbox of a name, or of the only one whose ID begins with text; empty:
// none.
func (t *target) search(ctx context.Context, text string) (string, error) {
	if text == "" {
		return "", nil
	}
	named, err := t.rest.List(ctx, restclient.ListOptions{States: anyState(), Name: text})
	if err != nil {
		return "", err
	}
	// Other servers of this API ignore the filter, and list all.
	if at := slices.IndexFunc(named, func(s restclient.Listed) bool { return s.Name == text }); at >= 0 {
		return named[at].SandboxID, nil
	}
	all, err := t.rest.List(ctx, restclient.ListOptions{States: anyState()})
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

// kind is a resource of the Kubernetes API with its names for users.
type kind struct {
	schema.GroupVersionResource
	noun string
	// id returns an object's ID, which it has beside its name.
	id func(metav1.Object) string
	// isID reports whether a text may be such an ID.
	isID func(text string) bool
}

func templateKind() kind {
	return kind{templatesResource(), "template", func(o metav1.Object) string {
		return pool.TemplateID(&extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{UID: o.GetUID()}})
	}, likeSandboxID}
}

// poolKind gives pools IDs like those of sandboxes and templates; the APIs have none.
func poolKind() kind {
	return kind{poolsResource(), "pool", func(o metav1.Object) string { return "p" + string(sandbox.IDOf(o.GetUID()))[1:] }, likeSandboxID}
}

func keyKind() kind {
	return kind{keysResource(), "key", func(o metav1.Object) string { return string(o.GetUID()) }, func(text string) bool {
		return uuid.Validate(text) == nil
	}}
}

// checkpointKind is for snapshots as objects: their ID is the REST API's.
func checkpointKind() kind {
	return kind{checkpointsResource(), "snapshot", func(o metav1.Object) string {
		return (&barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), Labels: o.GetLabels()}}).SnapshotID()
	}, func(text string) bool { return strings.Contains(text, ":") }}
}

func likeSandboxID(text string) bool {
	_, err := sandbox.ParseID(text)
	return err == nil
}

// nameOf returns the name of an object in a namespace: the object of the ID, else the name itself,
// which need not exist.
func (k *kube) nameOf(ctx context.Context, of kind, namespace, text string) (string, error) {
	if !of.isID(text) {
		return text, nil
	}
	list, err := k.client.Resource(of.GroupVersionResource).Namespace(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", kubeError(err)
	}
	for i := range list.Items {
		if of.id(&list.Items[i]) == text {
			return list.Items[i].GetName(), nil
		}
	}
	return text, nil
}

// getNamed reads the object of a text as T.
func getNamed[T any](ctx context.Context, k *kube, of kind, namespace, text string) (T, error) {
	name, err := k.nameOf(ctx, of, namespace, text)
	if err != nil {
		var none T
		return none, err
	}
	v, err := getAs[T](ctx, k, of.GroupVersionResource, namespace, name)
	return v, of.missing(err, namespace, text)
}

// snapshotObject returns the name of a checkpoint: by the ID, else by the object's name, else the
// newest snapshot of the name.
func (k *kube) snapshotObject(ctx context.Context, namespace, text string) (string, error) {
	list, err := listAs[barchan.Checkpoint](ctx, k, checkpointsResource(), namespace)
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
	if object == "" && newest != nil {
		object = newest.Name
	}
	return cmp.Or(object, text), nil
}

// missing describes a missing object in the command line's terms.
func (of kind) missing(err error, namespace, text string) error {
	if !errors.Is(err, errs.ErrNotFound) {
		return err
	}
	return errs.Public(errs.ErrNotFound, fmt.Sprintf("%s %q not found in namespace %s; `barchan %s ls -A` lists all", of.noun, text, namespace, of.noun))
}
