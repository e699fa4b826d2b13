package quota

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Kind is a kind of objects, of which a namespace may have a number.
type Kind int

// The kinds.
const (
	// Templates are SandboxTemplates; each tag of a template is one.
	Templates Kind = iota
	// Snapshots are Checkpoints, those that the server makes for its own use included.
	Snapshots
	// Builds are TemplateBuilds that have not ended.
	Builds
	// Webhooks are Secrets of that type.
	Webhooks
	// Keys are APIKeys.
	Keys

	kinds = Keys + 1
)

// String returns the end of the kind's annotation, and of its setting.
func (k Kind) String() string {
	return [kinds]string{"templates", "snapshots", "builds", "webhooks", "keys"}[k]
}

// Annotation returns the annotation of a Namespace that overrides the limit of a kind: a whole number; 0 refuses every one.
func (k Kind) Annotation() string { return AnnotationPrefix + k.String() }

// Title returns the kind as the head of a row.
func (k Kind) Title() string {
	return [kinds]string{"Templates", "Snapshots", "Template builds", "Webhooks", "API keys"}[k]
}

// what describes the counted objects.
func (k Kind) what() string {
	return [kinds]string{"templates, tags included", "snapshots, the layers of builds included", "template builds that have not ended", "webhooks", "API keys"}[k]
}

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{Templates, Snapshots, Builds, Webhooks, Keys} }

// KindOf returns the kind of an object; false if it does not count.
func KindOf(o client.Object) (Kind, bool) {
	switch o := o.(type) {
	case *extensions.SandboxTemplate:
		return Templates, true
	case *barchan.Checkpoint:
		return Snapshots, true
	case *barchan.TemplateBuild:
		return Builds, !o.Ended()
	case *corev1.Secret:
		return Webhooks, barchan.IsWebhook(o)
	case *barchan.APIKey:
		return Keys, true
	}
	return 0, false
}

// counter names the objects of one kind in one namespace.
type counter struct {
	namespace string
	kind      Kind
}

// objects are those of a counter; guarded by Quotas.mu.
type objects struct {
	// sizes has those that the cache shows, by name, with their bytes on disk; their sum is bytes.
	sizes map[string]int64
	bytes int64
	// added has those that the cache does not show yet.
	added map[string]time.Time
}

func (b *objects) count() int64 { return int64(len(b.sizes) + len(b.added)) }

// Creator writes to the API server.
type Creator interface {
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
}

// Create creates an object unless its namespace has as many of its kind as it may. The error is that of Add, or to's.
func (q *Quotas) Create(ctx context.Context, to Creator, o client.Object) error {
	release, err := q.Add(ctx, o)
	if err != nil {
		return err
	}
	if err := to.Create(ctx, o); err != nil {
		release()
		return err
	}
	return nil
}

// Add counts an object that is to be created, until the cache shows it. The caller calls release if it is not created. At the limit
// the error is an errs.ErrExhausted whose public message names the limit and its value. Objects that do not count are not
// refused, nor are those that exist.
func (q *Quotas) Add(ctx context.Context, o client.Object) (release func(), err error) {
	kind, counts := KindOf(o)
	if !counts {
		return func() {}, nil
	}
	limits, err := q.limits(ctx, o.GetNamespace())
	if err == nil {
		err = q.checkContents(ctx, o.GetNamespace(), &limits, 1)
	}
	if err != nil {
		return nil, err
	}
	key, name := counter{o.GetNamespace(), kind}, o.GetName()
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.objectsLocked(key)
	_, exists := b.sizes[name]
	if _, added := b.added[name]; added || exists {
		return func() {}, nil
	}
	if err := checkObjects(kind, limits.Objects[kind], b.count(), 1); err != nil {
		return nil, err
	}
	b.added[name] = time.Now()
	q.objects[key] = b
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		delete(b.added, name)
	}, nil
}

// CheckRoom refuses more objects of a kind than a namespace may have, as Add does. It counts none.
func (q *Quotas) CheckRoom(ctx context.Context, namespace string, kind Kind, more int64) error {
	limits, err := q.limits(ctx, namespace)
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return checkObjects(kind, limits.Objects[kind], q.objectsLocked(counter{namespace, kind}).count(), more)
}

func checkObjects(kind Kind, limit Limit, used, more int64) error {
	if !limit.Set || more <= 0 || used+more <= limit.Most {
		return nil
	}
	return errs.Public(errs.ErrExhausted, fmt.Sprintf("quota of the namespace: at most %d %s (%s); it has %d, delete some", limit.Most, kind.what(), kind.Annotation(), used))
}

// Objects returns how many objects of a kind a namespace has.
func (q *Quotas) Objects(namespace string, kind Kind) int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.objectsLocked(counter{namespace, kind}).count()
}

// Stored returns the bytes that a namespace has on disk: the sizes of its snapshots, and the memory of its paused sandboxes.
func (q *Quotas) Stored(namespace string) int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	bytes := q.objectsLocked(counter{namespace, Snapshots}).bytes
	if b := q.namespaces[namespace]; b != nil {
		bytes += b.stored
	}
	return bytes
}

// ObserveObjects returns what applies the changes of a kind's objects: newer is nil after a deletion.
func ObserveObjects[T interface {
	client.Object
	comparable
}](q *Quotas) func(older, newer T) {
	var none T
	return func(older, newer T) {
		if newer == none {
			q.observeObject(older, false)
		} else {
			q.observeObject(newer, true)
		}
	}
}

func (q *Quotas) observeObject(o client.Object, exists bool) {
	kind, counts := KindOf(o)
	key, name := counter{o.GetNamespace(), kind}, o.GetName()
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.objectsLocked(key)
	delete(b.added, name)
	b.bytes -= b.sizes[name]
	delete(b.sizes, name)
	if exists && counts {
		b.sizes[name] = sizeOf(o)
		b.bytes += b.sizes[name]
	}
	if q.objects[key] = b; b.count() == 0 {
		delete(q.objects, key)
	}
}

// sizeOf returns the bytes of a snapshot on disk.
func sizeOf(o client.Object) int64 {
	if c, is := o.(*barchan.Checkpoint); is && c.Status.Size != nil {
		return c.Status.Size.Value()
	}
	return 0
}

// objectsLocked returns the objects of a counter, without those whose creation has failed unseen. For a counter without objects they
// are new, and kept by who adds one.
//
// +checklocks:q.mu
func (q *Quotas) objectsLocked(key counter) *objects {
	b := q.objects[key]
	if b == nil {
		return &objects{sizes: map[string]int64{}, added: map[string]time.Time{}}
	}
	for name, at := range b.added {
		if time.Since(at) > reservationTTL {
			delete(b.added, name)
		}
	}
	return b
}
