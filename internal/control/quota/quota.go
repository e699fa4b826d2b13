package quota

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// reservationTTL ends a reservation whose sandbox was created and deleted without the cache showing it.
const reservationTTL = 2 * time.Minute

// Size is the resource use of one sandbox.
type Size struct {
	MilliCPU int64 // thousandths of a core
	Memory   int64 // bytes
}

// Reader reads namespaces from memory; package cache implements it.
type Reader interface {
	// Namespace returns an errs.ErrNotFound for a missing namespace.
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

// Config configures New.
type Config struct {
	// Reader and Log are required.
	Reader Reader
	Log    *slog.Logger
	// Contents returns the sum of the sizes of a namespace's objects, in bytes. Nil: Limits.Contents is not applied.
	Contents func(ctx context.Context, namespace string) (int64, error)
	// Defaults apply to each field that the annotations of a namespace do not set. Zero: unlimited.
	Defaults Limits
	// DefaultSize is the size of a sandbox whose template sets no limits. Default 2 cores and 1 GiB.
	DefaultSize Size
}

// Quotas counts the use of each namespace. It is safe for concurrent use and has no goroutine: the
// owner passes cache events to Observe.
type Quotas struct {
	cfg Config
	log *slog.Logger

	mu         sync.Mutex
	namespaces map[string]*namespaceUsage // +checklocks:mu
	logged     map[string]string          // the last logged annotation errors by namespace; +checklocks:mu
	rates      map[string]*rate.Limiter   // of creates by namespace; +checklocks:mu
	writes     map[string]*rate.Limiter   // of bytes by namespace; +checklocks:mu
	objects    map[counter]*objects       // +checklocks:mu
	woken      []func()                   // what unlock calls; +checklocks:mu
}

// namespaceUsage is the use of one namespace; guarded by Quotas.mu.
type namespaceUsage struct {
	running, paused Use
	reserved        Use   // by reservations
	stored          int64 // bytes of the memory on disk
	sandboxes       map[string]entry
	reservations    map[*Reservation]struct{}
	bySandbox       map[string]*Reservation // reservations with a sandbox
	queue           list.List               // of *Waiter, the oldest first
}

// entry is the counted use of one sandbox.
type entry struct {
	uid string
	// version orders the events of one sandbox.
	version string
	size    Size
	paused  bool
	// stored is the size of its memory on disk, in bytes.
	stored int64
}

// Use is a number of sandboxes and their total size.
type Use struct {
	Sandboxes int64
	Size
}

func (u *Use) add(s Size, sign int64) {
	u.Sandboxes += sign
	u.MilliCPU += sign * s.MilliCPU
	u.Memory += sign * s.Memory
}

func (u Use) plus(v Use) Use {
	return Use{u.Sandboxes + v.Sandboxes, Size{u.MilliCPU + v.MilliCPU, u.Memory + v.Memory}}
}

// New returns Quotas without any use.
func New(cfg Config) (*Quotas, error) {
	if cfg.Reader == nil || cfg.Log == nil {
		return nil, fmt.Errorf("quota: Reader and Log are required: %w", errs.ErrInvalid)
	}
	cfg.DefaultSize.MilliCPU = cmp.Or(cfg.DefaultSize.MilliCPU, 2*milli)
	cfg.DefaultSize.Memory = cmp.Or(cfg.DefaultSize.Memory, 1<<30)
	return &Quotas{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "quota"),
		namespaces: map[string]*namespaceUsage{}, logged: map[string]string{}, rates: map[string]*rate.Limiter{}, writes: map[string]*rate.Limiter{}, objects: map[counter]*objects{},
	}, nil
}

// SizeOf returns the sum of the limits of a Pod's containers, with DefaultSize where the first has none.
func (q *Quotas) SizeOf(pod *corev1.PodSpec) Size {
	var size Size
	for i := range pod.Containers {
		limits := pod.Containers[i].Resources.Limits
		cpu, memory := limits.Cpu().MilliValue(), limits.Memory().Value()
		if i == 0 { // those of the others are beside it
			cpu, memory = cmp.Or(cpu, q.cfg.DefaultSize.MilliCPU), cmp.Or(memory, q.cfg.DefaultSize.Memory)
		}
		size.MilliCPU += cpu
		size.Memory += memory
	}
	return size
}

// Request is the use of one sandbox to reserve.
type Request struct {
	Namespace string
	Size      Size
	// Paused marks the resume of an existing paused sandbox.
	Paused bool
}

// Hold reserves the use of one more sandbox. The caller names the sandbox by [Reservation.For] before
// it writes it, and calls Release if the write fails. The reservation is nil if no limit applies.
// A refusal is an errs.ErrExhausted whose public message names the quota, its value and the use. A new
// sandbox is also refused while requests wait ([Quotas.Await]); the resume of a paused one is not.
func (q *Quotas) Hold(ctx context.Context, req Request) (*Reservation, error) {
	return q.hold(ctx, req, nil)
}

// errNotFirst is within the errs.ErrExhausted for a request that others in the queue come before.
var errNotFirst = errors.New("others wait")

// hold is Hold; w is the request's place in the queue, nil if it does not wait.
func (q *Quotas) hold(ctx context.Context, req Request, w *Waiter) (*Reservation, error) {
	limits, err := q.limits(ctx, req.Namespace)
	if err != nil {
		return nil, err
	}
	if !req.Paused {
		if err := q.checkContents(ctx, req.Namespace, &limits, 1); err != nil {
			return nil, err
		}
	}
	if limits.none() || (req.Paused && limits.CountPaused) {
		return nil, nil //nolint:nilnil // a nil Reservation is valid
	}
	q.mu.Lock()
	defer q.unlock()
	b := q.usageLocked(req.Namespace)
	b.dropExpired(time.Now())
	front := b.queue.Front()
	first := req.Paused || front == nil || w != nil && front == w.place
	if err := b.check(&limits, req.Size); err != nil {
		if !first {
			err = fmt.Errorf("%w: %w", errNotFirst, err)
		}
		return nil, err
	}
	if !first {
		return nil, errs.Public(fmt.Errorf("%w: %w", errs.ErrExhausted, errNotFirst), fmt.Sprintf("queue of the namespace: %d requests wait for room", b.queue.Len()))
	}
	if !req.Paused {
		if err := q.takeNewLocked(req.Namespace, b, &limits); err != nil {
			return nil, err
		}
	}
	r := &Reservation{quotas: q, namespace: req.Namespace, size: req.Size, since: time.Now()}
	b.reservations[r] = struct{}{}
	b.reserved.add(r.size, 1)
	return r, nil
}

// MaxSandboxes bounds the sandboxes of a namespace that has limits, in any state: an object takes memory of the server also while
// its sandbox is paused.
const MaxSandboxes = 10_000

// takeNewLocked counts a create against the rate of its namespace, and refuses one beyond MaxSandboxes.
//
// +checklocks:q.mu
func (q *Quotas) takeNewLocked(namespace string, b *namespaceUsage, limits *Limits) error {
	if n := b.running.Sandboxes + b.paused.Sandboxes + b.reserved.Sandboxes; n >= MaxSandboxes {
		return errs.Public(errs.ErrExhausted, fmt.Sprintf("quota of the namespace: at most %d sandboxes, paused ones included; it has %d", MaxSandboxes, n))
	}
	return q.takeRateLocked(namespace, limits.Creates)
}

// AddPaused counts a new sandbox that is paused from the start, which uses nothing that has a limit but the server's memory. A refusal
// is an errs.ErrExhausted.
func (q *Quotas) AddPaused(ctx context.Context, namespace string) error {
	limits, err := q.limits(ctx, namespace)
	if err == nil {
		err = q.checkContents(ctx, namespace, &limits, 1)
	}
	if err != nil || limits.none() {
		return err
	}
	q.mu.Lock()
	defer q.unlock()
	b := q.usageLocked(namespace)
	defer b.deleteIfEmpty(q.namespaces, namespace)
	return q.takeNewLocked(namespace, b, &limits)
}

// Limits returns the limits of a namespace.
func (q *Quotas) Limits(ctx context.Context, namespace string) (Limits, error) {
	return q.limits(ctx, namespace)
}

// limits returns the limits of a namespace. A missing one has the defaults: the API server refuses
// the write itself.
func (q *Quotas) limits(ctx context.Context, namespace string) (Limits, error) {
	ns, err := q.cfg.Reader.Namespace(ctx, namespace)
	if errors.Is(err, errs.ErrNotFound) {
		return q.cfg.Defaults, nil
	}
	if err != nil {
		return Limits{}, fmt.Errorf("read quotas of namespace %s: %w", namespace, err)
	}
	limits, faults := of(ns, q.cfg.Defaults)
	q.logFaults(ctx, namespace, errors.Join(faults...))
	return limits, nil
}

// logFaults logs the annotation errors of a namespace once for each change of them.
func (q *Quotas) logFaults(ctx context.Context, namespace string, fault error) {
	text := ""
	if fault != nil {
		text = fault.Error()
	}
	q.mu.Lock()
	changed := q.logged[namespace] != text
	if text == "" {
		delete(q.logged, namespace)
	} else {
		q.logged[namespace] = text
	}
	q.mu.Unlock()
	if changed && fault != nil {
		q.log.ErrorContext(ctx, "quota annotation invalid; using default or 0", telemetry.Namespace, namespace, telemetry.Error, fault)
	}
}

// +checklocks:q.mu
func (q *Quotas) usageLocked(namespace string) *namespaceUsage {
	b := q.namespaces[namespace]
	if b == nil {
		b = &namespaceUsage{sandboxes: map[string]entry{}, reservations: map[*Reservation]struct{}{}, bySandbox: map[string]*Reservation{}}
		q.namespaces[namespace] = b
	}
	return b
}

// used returns the counted and reserved use.
func (b *namespaceUsage) used(l *Limits) Use {
	use := b.running.plus(b.reserved)
	if l.CountPaused {
		use = use.plus(b.paused)
	}
	return use
}

// check returns an errs.ErrExhausted if one more sandbox of a size exceeds a limit.
func (b *namespaceUsage) check(l *Limits, size Size) error {
	use, counted := b.used(l), "running"
	if l.CountPaused {
		counted = "running or paused"
	}
	refuse := func(format string, args ...any) error {
		return errs.Public(errs.ErrExhausted, fmt.Sprintf("quota of the namespace: "+format, args...))
	}
	switch {
	case l.Sandboxes.Set && use.Sandboxes >= l.Sandboxes.Most:
		return refuse("at most %d sandboxes; %d are %s", l.Sandboxes.Most, use.Sandboxes, counted)
	case l.MilliCPU.Set && use.MilliCPU+size.MilliCPU > l.MilliCPU.Most:
		return refuse("at most %s CPU cores; sandboxes that are %s use %s, and this one would use %s",
			cores(l.MilliCPU.Most), counted, cores(use.MilliCPU), cores(size.MilliCPU))
	case l.Memory.Set && use.Memory+size.Memory > l.Memory.Most:
		return refuse("at most %s of memory; sandboxes that are %s use %s, and this one would use %s",
			bytes(l.Memory.Most), counted, bytes(use.Memory), bytes(size.Memory))
	}
	return nil
}

func cores(n int64) string { return strconv.FormatFloat(float64(n)/milli, 'f', -1, 64) }

func bytes(n int64) string { return resource.NewQuantity(n, resource.BinarySI).String() }

// Used returns the use of a namespace; running includes reservations.
func (q *Quotas) Used(namespace string) (running, paused Use) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.namespaces[namespace]
	if b == nil {
		return Use{}, Use{}
	}
	return b.running.plus(b.reserved), b.paused
}

// Observe applies a change of a Sandbox: newer is nil after a deletion, older after a creation.
// A caller that deleted or paused a sandbox may call it before the cache event arrives.
func (q *Quotas) Observe(older, newer *agents.Sandbox) {
	s := newer
	if s == nil {
		s = older
	}
	now, counts := q.entry(newer)
	q.mu.Lock()
	defer q.unlock()
	b := q.usageLocked(s.Namespace)
	if was, known := b.sandboxes[s.Name]; known {
		if newer == nil && was.uid != string(s.UID) {
			return // the deletion of an older sandbox of this name
		}
		if newer != nil && was.uid == string(s.UID) && precedes(s.ResourceVersion, was.version) {
			return
		}
		b.total(was).add(was.size, -1)
		b.stored -= was.stored
		delete(b.sandboxes, s.Name)
		b.wakeFirst(q)
	}
	if counts {
		b.sandboxes[s.Name] = now
		b.total(now).add(now.size, 1)
		b.stored += now.stored
	}
	if r := b.bySandbox[s.Name]; r != nil && counts && !now.paused {
		b.drop(r) // the entry counts from now on
	}
	b.deleteIfEmpty(q.namespaces, s.Namespace)
}

// entry returns the use of a sandbox; false if it does not count.
func (q *Quotas) entry(s *agents.Sandbox) (entry, bool) {
	if s == nil || pool.MemberOf(s) != "" || sandbox.DeadForGood(s) {
		return entry{}, false
	}
	e := entry{uid: string(s.UID), version: s.ResourceVersion, size: q.SizeOf(&s.Spec.PodTemplate.Spec), paused: sandbox.PhaseOf(s) == sandbox.Paused}
	if b := s.Status.Barchan; b != nil && b.MemorySize != nil {
		e.stored = b.MemorySize.Value()
	}
	return e, true
}

func precedes(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order < 0
}

func (b *namespaceUsage) total(e entry) *Use {
	if e.paused {
		return &b.paused
	}
	return &b.running
}

// drop ends a reservation.
func (b *namespaceUsage) drop(r *Reservation) {
	if _, held := b.reservations[r]; !held {
		return
	}
	delete(b.reservations, r)
	if b.bySandbox[r.sandbox] == r {
		delete(b.bySandbox, r.sandbox)
	}
	b.reserved.add(r.size, -1)
	b.wakeFirst(r.quotas)
}

// dropExpired ends reservations older than reservationTTL.
func (b *namespaceUsage) dropExpired(now time.Time) {
	for r := range b.reservations {
		if r.sandbox != "" && now.Sub(r.since) > reservationTTL {
			b.drop(r)
		}
	}
}

// deleteIfEmpty deletes the record of a namespace without sandboxes, reservations and waiting requests.
func (b *namespaceUsage) deleteIfEmpty(all map[string]*namespaceUsage, namespace string) {
	if len(b.sandboxes) == 0 && len(b.reservations) == 0 && b.queue.Len() == 0 {
		delete(all, namespace)
	}
}
