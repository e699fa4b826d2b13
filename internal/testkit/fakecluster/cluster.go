// Package fakecluster is a cluster for tests that want none: objects in memory, reads and waits as
// the cache has them, and a controller that fulfils the wishes in sandboxes at once, without
// anything running. It never serves production, and it proves nothing about the real parts.
//
// A pool is filled by [Cluster.Fill] alone: nothing replaces what is claimed.
//
// The image of a sandbox's first container decides its outcome: [ImageBroken] fails,
// [ImageSlow] never gets ready; anything else runs. One of [ImageStuck] is suspended and cannot be resumed with
// its memory, one of [ImageRestless] cannot be put to sleep, and one of [ImageUncapturable] has checkpoints that fail.
package fakecluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Images that mean something to the controller.
const (
	ImageBroken = "broken"
	ImageSlow   = "slow"

	ImageStuck        = "stuck"
	ImageRestless     = "restless"
	ImageUncapturable = "uncapturable"
)

// Cluster holds objects. Its embedded client writes them.
type Cluster struct {
	client.Client

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each write; +checklocks:mu
	// bells are those of the objects that callers wait for, closed at the next write of each.
	bells map[types.NamespacedName]chan struct{} // +checklocks:mu

	// turn is taken while the controller acts on what it finds.
	turn sync.Mutex
	held bool // +checklocks:turn

	// showing is taken while watchers are notified, and orders their events.
	showing  sync.Mutex
	watchers []func(older, newer *agents.Sandbox)     // +checklocks:showing
	shown    map[types.NamespacedName]*agents.Sandbox // last delivered version; +checklocks:showing
}

// New returns a cluster whose controller runs until the test ends.
func New(tb testing.TB, objects ...client.Object) *Cluster {
	tb.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, agents.AddToScheme, extensions.AddToScheme, barchan.AddToScheme} {
		if err := add(scheme); err != nil {
			tb.Fatal(err)
		}
	}
	c := &Cluster{changed: make(chan struct{}), bells: map[types.NamespacedName]chan struct{}{}, shown: map[types.NamespacedName]*agents.Sandbox{}}
	c.Client = fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&agents.Sandbox{}, &barchan.Checkpoint{}, &barchan.TemplateBuild{}).WithInterceptorFuncs(c.hooks()).Build()
	ctx, cancel := context.WithCancel(tb.Context())
	for _, obj := range objects {
		if err := c.Create(ctx, obj); err != nil {
			tb.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { c.control(ctx) })
	tb.Cleanup(func() { cancel(); wg.Wait() })
	return c
}

// hooks does what an API server does and the fake client does not, and reports each write.
func (c *Cluster) hooks() interceptor.Funcs {
	return interceptor.Funcs{
		Create: func(ctx context.Context, w client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			defer c.wrote(ctx, w, obj)
			obj.SetUID(uuid.NewUUID())
			obj.SetGeneration(1)
			obj.SetCreationTimestamp(metav1.Now())
			return w.Create(ctx, obj, opts...)
		},
		Update: func(ctx context.Context, w client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			defer c.wrote(ctx, w, obj)
			if err := count(ctx, w, obj); err != nil {
				return err
			}
			return w.Update(ctx, obj, opts...)
		},
		Delete: func(ctx context.Context, w client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			defer c.wrote(ctx, w, obj)
			return w.Delete(ctx, obj, opts...)
		},
		SubResourceUpdate: func(ctx context.Context, w client.Client, sub string, obj client.Object, opts ...client.SubResourceUpdateOption) error {
			defer c.wrote(ctx, w, obj)
			return w.SubResource(sub).Update(ctx, obj, opts...)
		},
	}
}

// count makes a generation of each change of a sandbox's specification, by which readers match
// a condition to it. An update of an older one is a conflict.
func count(ctx context.Context, r client.Reader, obj client.Object) error {
	s, is := obj.(*agents.Sandbox)
	if !is {
		return nil
	}
	now := &agents.Sandbox{}
	if err := r.Get(ctx, client.ObjectKeyFromObject(obj), now); err != nil {
		return client.IgnoreNotFound(err) // the update has the error
	}
	if s.Generation = now.Generation; !apiequality.Semantic.DeepEqual(s.Spec, now.Spec) {
		s.Generation++
	}
	return nil
}

// wrote notifies the watchers, then the waiting callers.
func (c *Cluster) wrote(ctx context.Context, r client.Reader, obj client.Object) {
	defer c.ring(client.ObjectKeyFromObject(obj))
	if _, ok := obj.(*agents.Sandbox); ok {
		c.show(context.WithoutCancel(ctx), r, client.ObjectKeyFromObject(obj))
	}
}

func (c *Cluster) show(ctx context.Context, r client.Reader, key types.NamespacedName) {
	c.showing.Lock()
	defer c.showing.Unlock()
	older, newer := c.shown[key], &agents.Sandbox{}
	if err := r.Get(ctx, key, newer); err != nil {
		newer = nil
	}
	if older == nil && newer == nil {
		return
	}
	if c.shown[key] = newer; newer == nil {
		delete(c.shown, key)
	}
	for _, watch := range c.watchers {
		watch(older, newer)
	}
}

// Watch calls do for each change of a sandbox from now on, one after the other, as the cache does:
// newer is nil when it is gone, older when it is new. Before a write returns, do has been called.
func (c *Cluster) Watch(do func(older, newer *agents.Sandbox)) {
	c.showing.Lock()
	defer c.showing.Unlock()
	c.watchers = append(c.watchers, do)
}

// ring notifies the controller and the callers that wait for any of the objects.
func (c *Cluster) ring(keys ...types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.changed)
	c.changed = make(chan struct{})
	for _, key := range keys {
		if bell, awaited := c.bells[key]; awaited {
			close(bell)
			delete(c.bells, key)
		}
	}
}

// bellOf is closed at the next write of an object of any kind that has the key.
func (c *Cluster) bellOf(key types.NamespacedName) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bells[key] == nil {
		c.bells[key] = make(chan struct{})
	}
	return c.bells[key]
}

func (c *Cluster) bell() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Hold stops the controller from doing anything, until Hold(false). What it was at is done when
// Hold returns.
func (c *Cluster) Hold(held bool) {
	c.turn.Lock()
	c.held = held
	c.turn.Unlock()
	c.ring()
}

// control reconciles all sandboxes at each change. What fails is tried again at the next one,
// which the write that got in the way has caused.
func (c *Cluster) control(ctx context.Context) {
	for ctx.Err() == nil {
		bell := c.bell()
		if err := c.act(ctx); err != nil && ctx.Err() == nil {
			continue
		}
		select {
		case <-bell:
		case <-ctx.Done():
		}
	}
}

// act does once what there is to do, unless the controller is held.
func (c *Cluster) act(ctx context.Context) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	if c.held {
		return nil
	}
	err := c.captureAll(ctx)
	all, other := c.Sandboxes(ctx, "")
	err = errors.Join(err, other)
	for _, s := range all {
		err = errors.Join(err, Reconcile(ctx, c.Client, s))
	}
	return err
}

// Reconcile sets the status of a sandbox at once to what its spec requests. c may be any
// cluster's client.
func Reconcile(ctx context.Context, c client.Client, s *agents.Sandbox) error {
	if s.DeletionTimestamp != nil {
		s.Finalizers = slices.DeleteFunc(s.Finalizers, func(f string) bool { return f == agents.NodeFinalizer })
		return client.IgnoreNotFound(c.Update(ctx, s))
	}
	before := s.DeepCopy()
	if err := fulfil(ctx, c, s); err != nil {
		return err
	}
	if equal(before, s) {
		return nil
	}
	return client.IgnoreNotFound(c.Status().Update(ctx, s))
}

func imageOf(s *agents.Sandbox) string {
	if len(s.Spec.PodTemplate.Spec.Containers) == 0 {
		return ""
	}
	return s.Spec.PodTemplate.Spec.Containers[0].Image
}

// fulfil sets the status of a sandbox to what it wishes.
func fulfil(ctx context.Context, c client.Client, s *agents.Sandbox) error {
	image := imageOf(s)
	reason, message, err := origin(ctx, c, s)
	if err != nil {
		return err
	}
	switch {
	case reason == agents.ReasonPodFailed:
		set(s, agents.ConditionFinished, true, reason, message)
	case reason != "":
		set(s, agents.ConditionReady, false, reason, message)
	case image == ImageStuck && sandbox.Suspended(s) && s.Spec.OperatingMode == agents.ModeRunning && !fromFiles(s):
		set(s, agents.ConditionReady, false, sandbox.ReasonResumeFailed, "the memory is damaged")
	case image == ImageBroken:
		set(s, agents.ConditionFinished, true, agents.ReasonPodFailed, "the image cannot be used")
	case image == ImageSlow:
		set(s, agents.ConditionReady, false, agents.ReasonDependenciesNotReady, "the image is being unpacked")
	case image == ImageRestless && s.Spec.OperatingMode == agents.ModeSuspended:
		set(s, agents.ConditionSuspended, false, sandbox.ReasonSuspendFailed, "the disk is full")
	case s.Spec.OperatingMode == agents.ModeSuspended:
		set(s, agents.ConditionSuspended, true, agents.ReasonPodTerminated, "")
		set(s, agents.ConditionReady, false, agents.ReasonSandboxSuspended, "")
	case !sandbox.Ready(s):
		s.Status.PodIPs = []string{"127.0.0.1"}
		s.Status.Barchan = &agents.BarchanStatus{ID: string(sandbox.IDOf(s.UID)), StartedAt: new(metav1.Now())}
		set(s, agents.ConditionSuspended, false, agents.ReasonNotSuspended, "")
		set(s, agents.ConditionReady, true, agents.ReasonDependenciesReady, "")
	default: // as before, and seen as it is now
		set(s, agents.ConditionReady, true, agents.ReasonDependenciesReady, "")
	}
	return nil
}

func equal(a, b *agents.Sandbox) bool {
	return fmt.Sprint(a.Status.Conditions) == fmt.Sprint(b.Status.Conditions)
}

func set(s *agents.Sandbox, kind string, status bool, reason, message string) {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: s.Generation}
	if status {
		c.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&s.Status.Conditions, c)
}

// Sandbox reads one sandbox.
func (c *Cluster) Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error) {
	return get(ctx, c.Client, key, &agents.Sandbox{})
}

// Template reads one template.
func (c *Cluster) Template(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error) {
	return get(ctx, c.Client, key, &extensions.SandboxTemplate{})
}

func get[T client.Object](ctx context.Context, r client.Reader, key types.NamespacedName, obj T) (T, error) {
	err := r.Get(ctx, key, obj)
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("%w: %w", errs.ErrNotFound, err)
	}
	return obj, err
}

// wait waits until done accepts the object of a key, or its absence, which is a nil object.
func wait[T client.Object](ctx context.Context, c *Cluster, what string, key types.NamespacedName, empty func() T, done func(T) (bool, error)) (T, error) {
	var none T
	for {
		bell := c.bellOf(key)
		now, err := get(ctx, c.Client, key, empty())
		if errors.Is(err, errs.ErrNotFound) {
			now, err = none, nil
		}
		if err != nil {
			return none, err
		}
		if ok, err := done(now); ok || err != nil {
			return now, err
		}
		select {
		case <-bell:
		case <-ctx.Done():
			return none, fmt.Errorf("wait for %s %s: %w: %w", what, key, errs.ErrTimeout, ctx.Err())
		}
	}
}

// CurrentSandbox reads one sandbox of a namespace.
func (c *Cluster) CurrentSandbox(ctx context.Context, namespace string, id sandbox.ID) (*agents.Sandbox, error) {
	s, err := c.SandboxByID(ctx, id)
	if err == nil && s.Namespace != namespace {
		return nil, fmt.Errorf("sandbox %s: %w", id, errs.ErrNotFound)
	}
	return s, err
}

// SandboxByID reads one sandbox.
func (c *Cluster) SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	all, err := c.Sandboxes(ctx, "")
	if err != nil {
		return nil, err
	}
	for i := range all {
		if sandbox.IDOf(all[i].UID) == id {
			return all[i], nil
		}
	}
	return nil, fmt.Errorf("sandbox %s: %w", id, errs.ErrNotFound)
}

// Sandboxes lists a namespace, or with "" all.
func (c *Cluster) Sandboxes(ctx context.Context, namespace string) (all []*agents.Sandbox, err error) {
	var list agents.SandboxList
	err = c.List(ctx, &list, client.InNamespace(namespace))
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}
	return all, err
}

// SandboxesByIdempotency lists those of a namespace that were made for a key.
func (c *Cluster) SandboxesByIdempotency(ctx context.Context, namespace, hash string) ([]*agents.Sandbox, error) {
	all, err := c.Sandboxes(ctx, namespace)
	return slices.DeleteFunc(all, func(s *agents.Sandbox) bool { return s.Annotations[pool.AnnotationIdempotencyKey] != hash }), err
}

// CurrentTemplate reads one template and its revision.
func (c *Cluster) CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error) {
	t, err := c.Template(ctx, key)
	if err != nil {
		return nil, "", err
	}
	revision, _, err := pool.Revision(t)
	return t, revision, err
}

// PoolsOf lists the pools of a template in a namespace, or in all if that is empty.
func (c *Cluster) PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error) {
	var list extensions.SandboxWarmPoolList
	err := c.List(ctx, &list, client.InNamespace(namespace))
	return slices.DeleteFunc(list.Items, func(p extensions.SandboxWarmPool) bool { return pool.TemplateOf(&p) != template }), err
}

// Namespace reads one namespace.
func (c *Cluster) Namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	return get(ctx, c.Client, types.NamespacedName{Name: name}, &corev1.Namespace{})
}

// Fill adds members of the template as it is now to a pool, and returns when they are ready.
func (c *Cluster) Fill(tb testing.TB, namespace, name string, members int) []agents.Sandbox {
	tb.Helper()
	ctx := tb.Context()
	p, err := get(ctx, c.Client, types.NamespacedName{Namespace: namespace, Name: name}, &extensions.SandboxWarmPool{})
	if err != nil {
		tb.Fatal(err)
	}
	made, err := Fill(ctx, c.Client, p, members)
	for i := range made {
		if err != nil {
			break
		}
		var s *agents.Sandbox
		s, err = c.WaitSandbox(ctx, client.ObjectKeyFromObject(&made[i]), func(s *agents.Sandbox) (bool, error) { return s != nil && pool.Spare(s), nil })
		if err == nil {
			made[i] = *s
		}
	}
	if err != nil {
		tb.Fatal(err)
	}
	return made
}

// Fill adds members to a pool of any cluster, which are not ready yet.
func Fill(ctx context.Context, c client.Client, p *extensions.SandboxWarmPool, members int) ([]agents.Sandbox, error) {
	t, err := get(ctx, c, pool.TemplateOf(p), &extensions.SandboxTemplate{})
	if err != nil {
		return nil, err
	}
	revision, _, err := pool.Revision(t)
	if err != nil {
		return nil, err
	}
	made := make([]agents.Sandbox, members)
	for i := range made {
		made[i] = *pool.NewMember(p, t, revision)
		if err := c.Create(ctx, &made[i]); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// Pool returns a pool object for tests; templateNamespace may be empty.
func Pool(namespace, name, templateNamespace, template string) *extensions.SandboxWarmPool {
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	p.Spec.SandboxTemplateRef.Name = template
	p.Spec.Replicas = new(int32(0))
	if templateNamespace != "" {
		p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{TemplateNamespace: templateNamespace}
	}
	return p
}

// Templates lists a namespace.
func (c *Cluster) Templates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error) {
	var list extensions.SandboxTemplateList
	err := c.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// TemplatesNamed lists the objects of a namespace whose template has a name, an alias or an ID.
func (c *Cluster) TemplatesNamed(ctx context.Context, namespace, name string) ([]extensions.SandboxTemplate, error) {
	all, err := c.Templates(ctx, namespace)
	return slices.DeleteFunc(all, func(t extensions.SandboxTemplate) bool {
		own, _ := t.NameAndTag()
		return own != name && pool.TemplateID(&t) != name && (t.Spec.Barchan == nil || !slices.Contains(t.Spec.Barchan.Aliases, name))
	}), err
}

// CurrentTemplates lists a namespace.
func (c *Cluster) CurrentTemplates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error) {
	return c.Templates(ctx, namespace)
}

// APIKeys lists a namespace.
func (c *Cluster) APIKeys(ctx context.Context, namespace string) ([]barchan.APIKey, error) {
	var list barchan.APIKeyList
	err := c.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// APIKeyByHash reads one key.
func (c *Cluster) APIKeyByHash(ctx context.Context, hash string) (*barchan.APIKey, error) {
	all, err := c.APIKeys(ctx, "")
	if err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].Spec.SHA256 == hash {
			return &all[i], nil
		}
	}
	return nil, errs.ErrNotFound
}

// APIKeysBySSHKey reads the keys that hold an SSH key.
func (c *Cluster) APIKeysBySSHKey(ctx context.Context, fingerprint string) (found []*barchan.APIKey, err error) {
	all, err := c.APIKeys(ctx, "")
	for i := range all {
		if slices.ContainsFunc(all[i].Spec.SSHKeys, func(text string) bool { got, _ := barchan.SSHFingerprint(text); return got == fingerprint }) {
			found = append(found, &all[i])
		}
	}
	return found, err
}

// WaitSandbox waits as the cache does.
func (c *Cluster) WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	return wait(ctx, c, "sandbox", key, func() *agents.Sandbox { return &agents.Sandbox{} }, done)
}

// Template returns a template object for tests.
func Template(namespace, name, image string, change ...func(*extensions.SandboxTemplate)) *extensions.SandboxTemplate {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: image}}
	for _, f := range change {
		f(t)
	}
	return t
}

// Public marks a template as one for every tenant.
func Public(aliases ...string) func(*extensions.SandboxTemplate) {
	return func(t *extensions.SandboxTemplate) {
		t.Spec.Barchan = &extensions.TemplateBarchanSpec{Public: true, Aliases: aliases}
	}
}

// Aged sets when a sandbox started, for tests of order.
func (c *Cluster) Aged(ctx context.Context, id sandbox.ID, at time.Time) error {
	for {
		s, err := c.SandboxByID(ctx, id)
		if err != nil {
			return err
		}
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, pool.AnnotationClaimedAt, at.UTC().Format(time.RFC3339Nano))
		err = c.Update(ctx, s)
		if err == nil {
			s.Status.Barchan.StartedAt = new(metav1.NewTime(at))
			err = c.Status().Update(ctx, s)
		}
		if !apierrors.IsConflict(err) {
			return err
		}
	}
}
