package peers

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Defaults of Config.
const (
	DefaultFlushDelay = time.Millisecond
	DefaultQueue      = 8192
)

// Config names this replica and how it finds the others.
type Config struct {
	// Name is this replica's unique name, a lower-case DNS name. Its certificate has it.
	Name string
	// Bind is the listening address for gossip, on UDP and TCP; port 0 means any free one.
	Bind netip.AddrPort
	// PushBind is the listening address for pushes, over TLS; port 0 means any free one.
	PushBind netip.AddrPort
	// Advertise is the address announced to the others; by default Bind's. It is required if Bind or
	// PushBind is the unspecified address.
	Advertise netip.Addr
	// Seeds are "host:port" of the gossip of other replicas. Names are resolved for each try; names
	// that do not resolve, and this replica's own, do no harm.
	Seeds []string
	// KeyFile has the gossip key. It is created if missing; all replicas need the same key.
	KeyFile string
	// Key is the gossip key itself, 32 bytes, in place of KeyFile. It does not change while the replica runs.
	Key []byte
	// StateFile stores the members over restarts, and absent ones are contacted for a day. Empty: only seeds are contacted.
	StateFile string
	TLS       trust.Source
	// OnRoutes receives a member's hints, in no order. It is called from many goroutines and blocks
	// only its sender.
	OnRoutes func(from string, batch []push.Route)
	Log      *slog.Logger
	// Metrics is where metrics are registered; nil means nowhere.
	Metrics prometheus.Registerer
	// FlushDelay is how long a route waits for others to share its batch; 0 means DefaultFlushDelay,
	// less than 0 not at all.
	FlushDelay time.Duration
	// Queue bounds the sandboxes' routes queued for one member; 0 means DefaultQueue.
	Queue int

	// For tests.
	tune                 func(*memberlist.Config)
	reach                func(addr string) error // not nil: called before each connection
	lookup               func(ctx context.Context, network, host string) ([]netip.Addr, error)
	rejoinMin, rejoinMax time.Duration
}

// Replica is this process among its peers. Make it with New. All methods but Run may be called at any
// time from any goroutine.
type Replica struct {
	cfg      Config
	log      *slog.Logger
	metrics  *metrics
	keys     *keyring
	trust    *trust.Trust
	receiver *receiver
	ready    chan struct{}
	self     Member // complete once ready is closed

	queues atomic.Pointer[[]*push.Queue]         // +checklocksignore
	gossip atomic.Pointer[memberlist.Memberlist] // +checklocksignore
	batch  atomic.Uint64                         // the number of the last batch sent to any member

	// Each has an element when its goroutine has work.
	changed chan struct{} // for feed
	learnt  chan struct{} // for persistMembers
	away    chan struct{} // for rejoin

	mu      sync.Mutex
	members map[string]Member      // +checklocks:mu
	queueOf map[string]*push.Queue // +checklocks:mu
	known   map[string]savedMember // +checklocks:mu
}

// New checks the configuration and reads keys and certificates, creating them if missing. It starts
// nothing.
func New(cfg Config) (*Replica, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	r := &Replica{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "peers"), ready: make(chan struct{}), members: map[string]Member{}, queueOf: map[string]*push.Queue{},
		changed: make(chan struct{}, 1), learnt: make(chan struct{}, 1), away: make(chan struct{}, 1),
		self: Member{Name: cfg.Name, Boot: rand.Text(), Since: time.Now()},
	}
	r.queues.Store(&[]*push.Queue{})
	var err error
	if r.trust, err = trust.Open(cfg.Name, cfg.TLS); err != nil {
		return nil, err
	}
	if r.keys, err = openKeys(cfg.KeyFile, cfg.Key); err != nil {
		return nil, err
	}
	if r.metrics, err = newMetrics(cfg.Metrics, r.waiting); err != nil {
		return nil, fmt.Errorf("peers: register metrics: %w", err)
	}
	r.known = r.loadMembers()
	r.receiver = &receiver{
		log: r.log, metrics: r.metrics, boot: r.self.Boot, member: r.member, onRoutes: cfg.OnRoutes, heard: map[string]lastBatch{},
	}
	return r, nil
}

func (cfg *Config) complete() error {
	if cfg.Log == nil {
		cfg.Log = telemetry.Discard()
	}
	if cfg.lookup == nil {
		cfg.lookup = net.DefaultResolver.LookupNetIP
	}
	cfg.FlushDelay = cmp.Or(cfg.FlushDelay, DefaultFlushDelay)
	cfg.Queue = cmp.Or(cfg.Queue, DefaultQueue)
	cfg.rejoinMin = cmp.Or(cfg.rejoinMin, firstRejoin)
	cfg.rejoinMax = cmp.Or(cfg.rejoinMax, longestRejoin)
	if !cfg.Advertise.IsValid() {
		cfg.Advertise = cfg.Bind.Addr()
	}
	var bad error
	no := func(field, want string) {
		bad = errors.Join(bad, fmt.Errorf("peers: %s: want %s: %w", field, want, errs.ErrInvalid))
	}
	if problems := validation.IsDNS1123Subdomain(cfg.Name); len(problems) > 0 {
		no("Name", strings.Join(problems, "; "))
	}
	if !cfg.Bind.IsValid() {
		no("Bind", "address:port")
	}
	if !cfg.PushBind.IsValid() {
		no("PushBind", "address:port")
	}
	if !cfg.Advertise.IsValid() || cfg.Advertise.IsUnspecified() || cfg.Advertise.Zone() != "" {
		no("Advertise", "one address that the other replicas reach")
	}
	if !cfg.hasKey() {
		no("KeyFile", fmt.Sprintf("a path, or else a Key of %d bytes", keyBytes))
	}
	if cfg.OnRoutes == nil {
		no("OnRoutes", "a function")
	}
	if cfg.Queue < 0 {
		no("Queue", "a number above 0")
	}
	for _, seed := range cfg.Seeds {
		if _, _, err := splitSeed(seed); err != nil {
			no("Seeds", fmt.Sprintf("host:port, not %.100q", seed))
		}
	}
	return bad
}

// hasKey reports whether there is one source of the gossip key.
func (cfg *Config) hasKey() bool {
	if cfg.KeyFile != "" {
		return cfg.Key == nil
	}
	return len(cfg.Key) == keyBytes
}

// Run takes part until ctx is done, then leaves the cluster. It is called once.
//
// All its goroutines have ended when it returns, except memberlist's pending probes: they end within a
// probe's interval, and do nothing.
func (r *Replica) Run(ctx context.Context) error {
	pushes, err := (&net.ListenConfig{}).Listen(ctx, "tcp", r.cfg.PushBind.String())
	if err != nil {
		return fmt.Errorf("listen for pushes: %w", err)
	}
	defer func() { _ = pushes.Close() }() // closed by the server, if it started
	t, err := r.listen(ctx)
	if err != nil {
		return err
	}
	pushPort, _ := netip.ParseAddrPort(pushes.Addr().String())
	r.self.Push = netip.AddrPortFrom(r.cfg.Advertise, pushPort.Port())
	r.self.Gossip = netip.AddrPortFrom(r.cfg.Advertise, uint16(t.GetAutoBindPort())) //nolint:gosec // a port
	list, err := memberlist.Create(r.memberlistConfig(ctx, t))
	if err != nil {
		return errors.Join(fmt.Errorf("start gossip: %w", err), t.Shutdown())
	}
	r.gossip.Store(list)
	close(r.ready)
	r.log.InfoContext(ctx, "listening for peers", telemetry.Address, r.self.Gossip, "pushes", r.self.Push)

	inner, cancel := context.WithCancel(ctx)
	var failed error
	var wg sync.WaitGroup
	wg.Go(func() { defer cancel(); failed = r.receiver.serve(inner, pushes, r.trust) })
	wg.Go(func() { r.feed(inner) })
	wg.Go(func() { r.rejoin(inner, list) })
	wg.Go(func() { r.persistMembers(inner) })
	<-inner.Done()
	r.gossip.Store(nil)
	if err := list.Leave(leaveTimeout); err != nil {
		r.log.InfoContext(ctx, "left without a goodbye", telemetry.Error, err)
	}
	t.hangUp() // ends joins
	err = list.Shutdown()
	wg.Wait()
	r.queues.Store(&[]*push.Queue{})
	return errors.Join(failed, err)
}

// Ready is closed when this replica listens.
func (r *Replica) Ready() <-chan struct{} { return r.ready }

// Self returns this replica as the others see it. Its addresses are set once Ready is closed.
func (r *Replica) Self() Member {
	select {
	case <-r.ready:
		self := r.self
		self.Keys = r.keys.ids()
		return self
	default:
		return Member{Name: r.self.Name, Boot: r.self.Boot, Keys: r.keys.ids(), Since: r.self.Since}
	}
}

// Members returns the other replicas that are present now, by name.
func (r *Replica) Members() []Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.members), func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
}

// Push sends a route to all members. It does not block; see the package on delivery. A route with a
// malformed version is dropped and counted.
func (r *Replica) Push(rt route.Route) { r.push(&push.Route{Route: rt}) }

// PushDelete reports to all members that a sandbox is dead for good, or gone, as of the route's
// version. Of the rest of the route, only name and UID are used.
func (r *Replica) PushDelete(rt route.Route) { r.push(&push.Route{Route: rt, Deleted: true}) }

func (r *Replica) push(rt *push.Route) {
	if !push.WellFormed(rt.ResourceVersion) {
		r.metrics.onLeave.WithLabelValues(lostInvalid).Inc()
		return
	}
	for _, q := range *r.queues.Load() {
		switch q.Add(rt) {
		case push.Queued:
		case push.Coalesced:
			r.metrics.merged.Inc()
		case push.Overflown:
			r.metrics.onLeave.WithLabelValues(lostOverflow).Inc()
		}
	}
}

func (r *Replica) waiting() float64 {
	var n int
	for _, q := range *r.queues.Load() {
		n += q.Len()
	}
	return float64(n)
}

func (r *Replica) member(name string) (Member, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m, ok := r.members[name]
	return m, ok
}

func (r *Replica) room(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.members[name]
	return ok || len(r.members) < maxMembers
}

// onJoin records a member that has joined or changed.
func (r *Replica) onJoin(n *memberlist.Node) {
	if n.Name == r.cfg.Name {
		return
	}
	m, err := memberOf(n)
	if err != nil {
		return // NotifyAlive has rejected it
	}
	r.mu.Lock()
	old, had := r.members[m.Name]
	if m.Since = time.Now(); had && old.Boot == m.Boot {
		m.Since = old.Since
	}
	r.members[m.Name] = m
	if r.cfg.StateFile != "" {
		r.known[m.Name] = savedMember{m.Gossip, time.Now()}
	}
	if r.queueOf[m.Name] == nil {
		r.queueOf[m.Name] = push.NewQueue(r.cfg.Queue)
	}
	r.publishLocked()
	r.mu.Unlock()
	if !had || old.Boot != m.Boot {
		r.log.Info("member joined", telemetry.Peer, m.Name, telemetry.Address, m.Gossip)
	}
	signal(r.changed)
	signal(r.learnt)
}

// onMoved records the other address of a member. Once its old process is known to be dead, rejoin contacts it there: its
// own next exchange of state may be a minute away.
func (r *Replica) onMoved(n *memberlist.Node) {
	m, err := memberOf(n)
	if err != nil || m.Name == r.cfg.Name || r.cfg.StateFile == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known[m.Name] = savedMember{m.Gossip, time.Now()}
}

// onLeave records a member that has left. memberlist does not report whether it left gracefully, so
// rejoin tries to reach it in any case.
func (r *Replica) onLeave(n *memberlist.Node) {
	if n.Name == r.cfg.Name {
		return
	}
	r.mu.Lock()
	if q := r.queueOf[n.Name]; q != nil {
		r.metrics.onLeave.WithLabelValues(lostGone).Add(float64(q.Len()))
	}
	delete(r.members, n.Name)
	delete(r.queueOf, n.Name)
	r.publishLocked()
	r.mu.Unlock()
	r.log.Info("member gone", telemetry.Peer, n.Name)
	signal(r.changed)
	signal(r.learnt)
	signal(r.away)
}

// publishLocked publishes the queues to Push.
//
// +checklocks:r.mu
func (r *Replica) publishLocked() {
	queues := slices.Collect(maps.Values(r.queueOf))
	r.queues.Store(&queues)
	r.metrics.members.Set(float64(len(r.members)))
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// memberSender is the running sender to one process of a member.
type memberSender struct {
	to    Member
	queue *push.Queue
	stop  context.CancelFunc
	ended chan struct{}
}

func (l *memberSender) is(to *memberSender) bool {
	return l != nil && to != nil && l.to.Boot == to.to.Boot && l.to.Push == to.to.Push && l.queue == to.queue
}

// feed runs one sender per member, until ctx is done.
func (r *Replica) feed(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	lines := map[string]*memberSender{}
	for {
		want := r.wanted()
		for name, l := range lines {
			if !l.is(want[name]) {
				l.stop()
				<-l.ended
				delete(lines, name)
			}
		}
		for name, l := range want {
			if lines[name] != nil {
				continue
			}
			sending, stop := context.WithCancel(ctx)
			l.stop, l.ended = stop, make(chan struct{})
			lines[name] = l
			s := r.sender(l.to, l.queue)
			signal(l.queue.Wake) // routes queued for an earlier process of the member are for this one too
			wg.Go(func() { defer close(l.ended); s.run(sending) })
		}
		select {
		case <-ctx.Done():
			for _, l := range lines {
				l.stop()
			}
			return
		case <-r.changed:
		}
	}
}

func (r *Replica) wanted() map[string]*memberSender {
	r.mu.Lock()
	defer r.mu.Unlock()
	want := make(map[string]*memberSender, len(r.members))
	for name, m := range r.members {
		want[name] = &memberSender{to: m, queue: r.queueOf[name]}
	}
	return want
}

func (r *Replica) sender(to Member, q *push.Queue) *sender {
	dialer := &net.Dialer{}
	return &sender{
		log: r.log, metrics: r.metrics, from: r.cfg.Name, boot: r.self.Boot, to: to, queue: q, batch: push.MaxBatch,
		delay: r.cfg.FlushDelay, trust: r.trust, seq: &r.batch,
		dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if r.cfg.reach != nil {
				if err := r.cfg.reach(addr); err != nil {
					return nil, err
				}
			}
			return dialer.DialContext(ctx, network, addr)
		},
	}
}
