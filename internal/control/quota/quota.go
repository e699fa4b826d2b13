package quota

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// unseenFor is how long a reservation may wait to be seen in the cache. It only matters for
// one whose sandbox came and went without the cache having shown it.
const unseenFor = 2 * time.Minute

// Size is what one sandbox uses.
type Size struct {
	MilliCPU int64 // thousandths of a core
	Memory   int64 // bytes
}

// Reader reads namespaces from memory; package cache has it.
type Reader interface {
	// Namespace returns an errs.ErrNotFound for one that is not there.
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

// Config is what New needs.
type Config struct {
	// Reader and Log are required.
	Reader Reader
	Log    *slog.Logger
	// Defaults hold for every namespace whose annotations say nothing else. Zero: no quotas.
	Defaults Limits
	// DefaultSize is what a sandbox counts for where its blueprint sets no limits. Default
	// 2 cores and 1 GiB.
	DefaultSize Size
}

// Quotas knows what is used. It is safe for concurrent use. Nothing of it runs by itself: feed
// it by Observe.
type Quotas struct {
	cfg Config
	log *slog.Logger

	mu         sync.Mutex
	namespaces map[string]*namespaceUsage // +checklocks:mu
	told       map[string]string          // the faults of a namespace that were logged last; +checklocks:mu
}

// namespaceUsage are what one namespace uses; guarded by Quotas.mu.
type namespaceUsage struct {
	running, paused Use
	reserved        Use // by reservations that are not seen yet
	sandboxes       map[string]entry
	reservations    map[*Reservation]struct{}
	bySandbox       map[string]*Reservation // those that are not seen yet
}

// entry is what one sandbox counts for.
type entry struct {
	uid string
	// version orders what is heard of one sandbox.
	version string
	size    Size
	paused  bool
}

// Use is how much is used.
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

// New checks the configuration.
func New(cfg Config) (*Quotas, error) {
	if cfg.Reader == nil || cfg.Log == nil {
		return nil, fmt.Errorf("quota: Reader and Log are required: %w", errs.ErrInvalid)
	}
	if cfg.DefaultSize.MilliCPU == 0 {
		cfg.DefaultSize.MilliCPU = 2 * milli
	}
	if cfg.DefaultSize.Memory == 0 {
		cfg.DefaultSize.Memory = 1 << 30
	}
	return &Quotas{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "quota"),
		namespaces: map[string]*namespaceUsage{}, told: map[string]string{},
	}, nil
}

// SizeOf adds up the limits of a Pod's containers.
func (q *Quotas) SizeOf(pod *corev1.PodSpec) Size {
	var cpu, memory resource.Quantity
	for i := range pod.Containers {
		limits := pod.Containers[i].Resources.Limits
		cpu.Add(limits[corev1.ResourceCPU])
		memory.Add(limits[corev1.ResourceMemory])
	}
	s := Size{MilliCPU: cpu.MilliValue(), Memory: memory.Value()}
	if s.MilliCPU == 0 {
		s.MilliCPU = q.cfg.DefaultSize.MilliCPU
	}
	if s.Memory == 0 {
		s.Memory = q.cfg.DefaultSize.Memory
	}
	return s
}

// Reserve grants a namespace one more sandbox of a size. release gives the grant back: call it
// once the cache shows the sandbox, which counts by itself then, or when nothing came of it.
// A refusal is an errs.ErrExhausted whose public message names the quota, its value and the use.
func (q *Quotas) Reserve(ctx context.Context, namespace string, size Size) (release func(), err error) {
	r, err := q.Hold(ctx, Request{Namespace: namespace, Size: size})
	if err != nil {
		return nil, err
	}
	return r.Release, nil
}

// Request asks for what one sandbox uses.
type Request struct {
	Namespace string
	Size      Size
	// Paused says that the sandbox exists, and is to be resumed.
	Paused bool
}

// Hold is Reserve for who can say which sandbox it is for before it is written: then the
// sandbox counts at no time twice. A nil reservation may be used as any other.
func (q *Quotas) Hold(ctx context.Context, req Request) (*Reservation, error) {
	limits, err := q.limits(ctx, req.Namespace)
	if err != nil {
		return nil, err
	}
	if limits.none() || (req.Paused && limits.CountPaused) {
		return nil, nil //nolint:nilnil // nothing is to be reserved
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.usageLocked(req.Namespace)
	b.sweep(time.Now())
	if err := b.check(&limits, req.Size); err != nil {
		return nil, err
	}
	r := &Reservation{quotas: q, namespace: req.Namespace, size: req.Size, since: time.Now()}
	b.reservations[r] = struct{}{}
	b.reserved.add(r.size, 1)
	return r, nil
}

// limits are those of a namespace. One that is not there has the defaults: the API server is
// the one to refuse it.
func (q *Quotas) limits(ctx context.Context, namespace string) (Limits, error) {
	ns, err := q.cfg.Reader.Namespace(ctx, namespace)
	if errors.Is(err, errs.ErrNotFound) {
		return q.cfg.Defaults, nil
	}
	if err != nil {
		return Limits{}, fmt.Errorf("read the quotas of namespace %s: %w", namespace, err)
	}
	limits, faults := of(ns, q.cfg.Defaults)
	q.tell(ctx, namespace, errors.Join(faults...))
	return limits, nil
}

// tell logs what is wrong with the annotations of a namespace, once for each state of them.
func (q *Quotas) tell(ctx context.Context, namespace string, fault error) {
	text := ""
	if fault != nil {
		text = fault.Error()
	}
	q.mu.Lock()
	news := q.told[namespace] != text
	if text == "" {
		delete(q.told, namespace)
	} else {
		q.told[namespace] = text
	}
	q.mu.Unlock()
	if news && fault != nil {
		q.log.ErrorContext(ctx, "a quota cannot be read; the default holds, or else nothing is granted", telemetry.Namespace, namespace, telemetry.Error, fault)
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

// used is what counts in a namespace, with what is reserved.
func (b *namespaceUsage) used(l *Limits) Use {
	use := b.running.plus(b.reserved)
	if l.CountPaused {
		use = use.plus(b.paused)
	}
	return use
}

// check returns an errs.ErrExhausted if one more of a size is too much.
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

// Used is what the sandboxes of a namespace use, with what is reserved for those to come.
func (q *Quotas) Used(namespace string) (running, paused Use) {
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.namespaces[namespace]
	if b == nil {
		return Use{}, Use{}
	}
	return b.running.plus(b.reserved), b.paused
}

// Observe takes a change of any Sandbox: newer is nil when it is gone, older when it is new. Beside
// the cache's events, whoever has ended or paused a sandbox may tell at once.
func (q *Quotas) Observe(older, newer *agents.Sandbox) {
	s := newer
	if s == nil {
		s = older
	}
	now, counts := q.entry(newer)
	q.mu.Lock()
	defer q.mu.Unlock()
	b := q.usageLocked(s.Namespace)
	if was, known := b.sandboxes[s.Name]; known {
		if newer == nil && was.uid != string(s.UID) {
			return // the end of one whose name another has got
		}
		if newer != nil && was.uid == string(s.UID) && precedes(s.ResourceVersion, was.version) {
			return
		}
		b.total(was).add(was.size, -1)
		delete(b.sandboxes, s.Name)
	}
	if counts {
		b.sandboxes[s.Name] = now
		b.total(now).add(now.size, 1)
	}
	if r := b.bySandbox[s.Name]; r != nil && counts && !now.paused {
		b.drop(r) // it counts by itself from now on
	}
	b.tidy(q.namespaces, s.Namespace)
}

// entry is what a sandbox counts for; false if for nothing.
func (q *Quotas) entry(s *agents.Sandbox) (entry, bool) {
	if s == nil || pool.MemberOf(s) != "" || sandbox.DeadForGood(s) {
		return entry{}, false
	}
	return entry{uid: string(s.UID), version: s.ResourceVersion, size: q.SizeOf(&s.Spec.PodTemplate.Spec), paused: sandbox.PhaseOf(s) == sandbox.Paused}, true
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
}

// sweep drops what was to be seen long ago.
func (b *namespaceUsage) sweep(now time.Time) {
	for r := range b.reservations {
		if r.sandbox != "" && now.Sub(r.since) > unseenFor {
			b.drop(r)
		}
	}
}

// tidy forgets books with nothing in them.
func (b *namespaceUsage) tidy(all map[string]*namespaceUsage, namespace string) {
	if len(b.sandboxes) == 0 && len(b.reservations) == 0 {
		delete(all, namespace)
	}
}
