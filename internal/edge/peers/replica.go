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
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Defaults of Config.
const (
	DefaultFlushDelay = time.Millisecond
	DefaultQueue      = 8192
)

// Config says who this replica is and how it finds the others.
type Config struct {
	// Name is this replica's own among all, a lower-case DNS name. Its certificate has it.
	Name string
	// Bind is where gossip is heard, on UDP and TCP; port 0 means any free one.
	Bind netip.AddrPort
	// PushBind is where pushes are heard, over TLS; port 0 means any free one.
	PushBind netip.AddrPort
	// Advertise is the address that the others are told; by default that of Bind. It is needed
	// where Bind or PushBind is on all addresses.
	Advertise netip.Addr
	// Seeds are "host:port" of the gossip of other replicas. Names are resolved anew for each try;
	// one that does not resolve, or that is this replica itself, does no harm.
	Seeds []string
	// KeyFile has the gossip key. It is made with a new key if it is not there; all replicas need
	// the same.
	KeyFile string
	// StateFile remembers the members over restarts; empty means not to.
	StateFile string
	TLS       TLS
	// OnRoutes takes what a member says: hints, in no order that means anything. It is called from
	// many goroutines and holds its sender up, but nobody else.
	OnRoutes func(from string, batch []Route)
	Log      *slog.Logger
	// Metrics; nil keeps them to itself.
	Metrics prometheus.Registerer
	// FlushDelay is how long a route waits for company; 0 means DefaultFlushDelay, less than 0 not
	// at all.
	FlushDelay time.Duration
	// Queue is how many sandboxes' routes wait for one member at most; 0 means DefaultQueue.
	Queue int

	// For tests.
	tune                 func(*memberlist.Config)
	reach                func(addr string) error // not nil: nothing gets there
	lookup               func(ctx context.Context, network, host string) ([]netip.Addr, error)
	rejoinMin, rejoinMax time.Duration
}

// Replica is this process among its peers. Make it with New. All methods but Run may be called
// at any time from any goroutine.
type Replica struct {
	cfg      Config
	log      *slog.Logger
	metrics  *metrics
	keys     *keyring
	trust    *trust
	receiver *receiver
	ready    chan struct{}
	self     Member // whole once ready is closed

	queues atomic.Pointer[[]*queue]              // +checklocksignore
	gossip atomic.Pointer[memberlist.Memberlist] // +checklocksignore
	batch  atomic.Uint64                         // the number of the last batch sent, to whomever

	// Each has an element when there is something new for its goroutine.
	changed chan struct{} // for feed
	learnt  chan struct{} // for remember
	away    chan struct{} // for rejoin

	mu      sync.Mutex
	members map[string]Member      // +checklocks:mu
	queueOf map[string]*queue      // +checklocks:mu
	known   map[string]savedMember // +checklocks:mu
}

// New checks the configuration and reads keys and certificates, making those of our own if there
// are none. It starts nothing.
func New(cfg Config) (*Replica, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	r := &Replica{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "peers"), ready: make(chan struct{}), members: map[string]Member{}, queueOf: map[string]*queue{},
		changed: make(chan struct{}, 1), learnt: make(chan struct{}, 1), away: make(chan struct{}, 1),
		self: Member{Name: cfg.Name, Boot: rand.Text(), Since: time.Now()},
	}
	r.queues.Store(&[]*queue{})
	var err error
	if r.trust, err = openTrust(cfg.Name, cfg.TLS); err != nil {
		return nil, err
	}
	if r.keys, err = openKeys(cfg.KeyFile); err != nil {
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
	if cfg.KeyFile == "" {
		no("KeyFile", "a path")
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

// Run takes part until ctx is done, then says goodbye to the others. It is called once.
//
// All that it started has ended when it returns, but for probes of memberlist's that wait for
// their answer: they end within a probe's interval, and do nothing.
func (r *Replica) Run(ctx context.Context) error {
	pushes, err := (&net.ListenConfig{}).Listen(ctx, "tcp", r.cfg.PushBind.String())
	if err != nil {
		return fmt.Errorf("listen for pushes: %w", err)
	}
	defer func() { _ = pushes.Close() }() // the server has closed it, if it got so far
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
	r.queues.Store(&[]*queue{})
	return errors.Join(failed, err)
}

// Ready is closed when this replica listens.
func (r *Replica) Ready() <-chan struct{} { return r.ready }

// Self is this replica as the others see it. Its addresses are known once Ready is closed.
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

// Members are the other replicas that are here now, by name.
func (r *Replica) Members() []Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.SortedFunc(maps.Values(r.members), func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
}

// Push tells all members about a route. It never waits for any of them; see the package on what
// may become of it. A route whose version is not well formed is dropped and counted.
func (r *Replica) Push(rt route.Route) { r.push(&Route{Route: rt}) }

// PushDelete tells all members that a sandbox is dead for good, or gone, as of the route's
// version. Of the rest of the route, name and UID count.
func (r *Replica) PushDelete(rt route.Route) { r.push(&Route{Route: rt, Deleted: true}) }

func (r *Replica) push(rt *Route) {
	if !wellFormed(rt.ResourceVersion) {
		r.metrics.onLeave.WithLabelValues(lostInvalid).Inc()
		return
	}
	for _, q := range *r.queues.Load() {
		switch q.add(rt) {
		case queued:
		case coalesced:
			r.metrics.merged.Inc()
		case overflown:
			r.metrics.onLeave.WithLabelValues(lostOverflow).Inc()
		}
	}
}

func (r *Replica) waiting() float64 {
	var n int
	for _, q := range *r.queues.Load() {
		n += q.len()
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

// met notes a member that has come or changed.
func (r *Replica) onJoin(n *memberlist.Node) {
	if n.Name == r.cfg.Name {
		return
	}
	m, err := memberOf(n)
	if err != nil {
		return // NotifyAlive has refused it
	}
	r.mu.Lock()
	old, had := r.members[m.Name]
	if m.Since = time.Now(); had && old.Boot == m.Boot {
		m.Since = old.Since
	}
	r.members[m.Name] = m
	r.known[m.Name] = savedMember{m.Gossip, time.Now()}
	if r.queueOf[m.Name] == nil {
		r.queueOf[m.Name] = newQueue(r.cfg.Queue)
	}
	r.publishLocked()
	r.mu.Unlock()
	if !had || old.Boot != m.Boot {
		r.log.Info("member joined", telemetry.Peer, m.Name, telemetry.Address, m.Gossip)
	}
	signal(r.changed)
	signal(r.learnt)
}

// lost notes a member that has gone. memberlist does not tell whether it said goodbye, so it is
// looked for in any case.
func (r *Replica) onLeave(n *memberlist.Node) {
	if n.Name == r.cfg.Name {
		return
	}
	r.mu.Lock()
	if q := r.queueOf[n.Name]; q != nil {
		r.metrics.onLeave.WithLabelValues(lostGone).Add(float64(q.len()))
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

// publishLocked lets Push see the queues.
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

// memberSender is the sender to one life of a member, at work.
type memberSender struct {
	to    Member
	queue *queue
	stop  context.CancelFunc
	ended chan struct{}
}

func (l *memberSender) is(to *memberSender) bool {
	return l != nil && to != nil && l.to.Boot == to.to.Boot && l.to.Push == to.to.Push && l.queue == to.queue
}

// feed keeps one sender per member at work, until ctx is done.
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
			signal(l.queue.wake) // what waits from another life of the member is for this one too
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

func (r *Replica) sender(to Member, q *queue) *sender {
	dialer := &net.Dialer{}
	return &sender{
		log: r.log, metrics: r.metrics, from: r.cfg.Name, boot: r.self.Boot, to: to, queue: q, batch: maxBatch,
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
