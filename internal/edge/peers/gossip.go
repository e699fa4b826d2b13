package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
)

const (
	maxMembers      = 128
	announceTimeout = 2 * time.Second
	leaveTimeout    = time.Second
	streamTimeout   = 3 * time.Second
	bindTries       = 10
	warnEvery       = time.Minute
)

// meta is a member's gossip metadata beside its name and address; at most 512 bytes.
type meta struct {
	Version int            `json:"v"`
	Push    netip.AddrPort `json:"p"`
	Boot    string         `json:"b"`
	Keys    []string       `json:"k"`
}

// Member is another replica.
type Member struct {
	Name   string
	Gossip netip.AddrPort
	Push   netip.AddrPort
	// Boot identifies its process.
	Boot string
	// Keys are the IDs of the gossip keys that it holds, the one in use first.
	Keys []string
	// Since is when this replica last saw it join, by the local clock; for this replica itself, when
	// it was made.
	Since time.Time
}

func memberOf(n *memberlist.Node) (Member, error) {
	var about meta
	if err := json.Unmarshal(n.Meta, &about); err != nil {
		return Member{}, fmt.Errorf("read what %.100q says of itself: %w: %w", n.Name, err, errs.ErrInvalid)
	}
	addr, ok := netip.AddrFromSlice(n.Addr)
	switch {
	case len(validation.IsDNS1123Subdomain(n.Name)) > 0, !ok:
		return Member{}, fmt.Errorf("name %.100q or its address: %w", n.Name, errs.ErrInvalid)
	case about.Version != push.Version || about.Boot == "" || !about.Push.IsValid():
		return Member{}, fmt.Errorf("%s says nothing of itself that we understand: %w", n.Name, errs.ErrInvalid)
	}
	gossip := netip.AddrPortFrom(addr.Unmap(), n.Port)
	return Member{Name: n.Name, Gossip: gossip, Push: about.Push, Boot: about.Boot, Keys: about.Keys}, nil
}

// listen opens the gossip port, on UDP and TCP.
func (r *Replica) listen(ctx context.Context) (t *transport, err error) {
	var inner *memberlist.NetTransport
	for range bindTries { // the TCP port may be taken on UDP
		inner, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{r.cfg.Bind.Addr().String()}, BindPort: int(r.cfg.Bind.Port()), Logger: slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
		})
		if err == nil || r.cfg.Bind.Port() != 0 {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listen for gossip: %w", err)
	}
	return newTransport(ctx, inner, r.cfg.reach), nil
}

func (r *Replica) memberlistConfig(ctx context.Context, t *transport) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = r.cfg.Name
	c.Transport = t
	c.AdvertiseAddr = r.self.Gossip.Addr().String()
	c.AdvertisePort = int(r.self.Gossip.Port())
	c.BindPort = c.AdvertisePort
	c.Keyring = r.keys.ring
	c.TCPTimeout = streamTimeout
	// A replica at a new address takes its name over as soon as its old process is known to be dead.
	c.DeadNodeReclaimTime = time.Nanosecond
	c.Delegate = announcer{r}
	c.Events = events{r}
	c.Alive = events{r}
	c.Conflict = events{r}
	c.LogOutput = &logBridge{ctx: ctx, log: r.log, metrics: r.metrics}
	if r.cfg.tune != nil {
		r.cfg.tune(c)
	}
	return c
}

// announcer returns this replica's metadata. It implements memberlist.Delegate and ignores the rest.
type announcer struct{ r *Replica }

func (a announcer) NodeMeta(limit int) []byte {
	text, err := json.Marshal(meta{Version: push.Version, Push: a.r.self.Push, Boot: a.r.self.Boot, Keys: a.r.keys.ids()})
	if err != nil || len(text) > limit {
		return nil
	}
	return text
}

func (announcer) NotifyMsg([]byte)                {}
func (announcer) GetBroadcasts(int, int) [][]byte { return nil }
func (announcer) LocalState(bool) []byte          { return nil }
func (announcer) MergeRemoteState([]byte, bool)   {}

// events receives memberlist's events. memberlist holds its lock meanwhile: do not call it here.
type events struct{ r *Replica }

func (e events) NotifyJoin(n *memberlist.Node)   { e.r.onJoin(n) }
func (e events) NotifyUpdate(n *memberlist.Node) { e.r.onJoin(n) }
func (e events) NotifyLeave(n *memberlist.Node)  { e.r.onLeave(n) }

// NotifyAlive decides who may become a member.
func (e events) NotifyAlive(n *memberlist.Node) error {
	if n.Name == e.r.cfg.Name {
		return nil
	}
	if _, err := memberOf(n); err != nil {
		e.r.metrics.gossip.WithLabelValues(gossipMember).Inc()
		return err
	}
	if !e.r.room(n.Name) {
		e.r.metrics.gossip.WithLabelValues(gossipTooMany).Inc()
		return fmt.Errorf("there are %d members already: %w", maxMembers, errs.ErrExhausted)
	}
	return nil
}

// NotifyConflict is called for a member at two addresses: two members of one name, or one that has
// moved and whose old process is not yet known to be dead.
func (e events) NotifyConflict(_, other *memberlist.Node) {
	e.r.metrics.gossip.WithLabelValues(gossipName).Inc()
	e.r.onMoved(other)
}

// logBridge writes memberlist's log into slog. Most lines are about strangers and dead members, so
// they are at level debug. A failed decryption is reported only in that log; a test fails if a new
// version changes the text.
type logBridge struct {
	ctx     context.Context //nolint:containedctx // a writer has no other way to get one
	log     *slog.Logger
	metrics *metrics

	mu     sync.Mutex
	warned time.Time // +checklocks:mu
}

var undecipherable = [][]byte{
	[]byte("Decrypt packet failed"),
	[]byte("no installed keys could decrypt"),
	[]byte("remote state is not encrypted"),
	[]byte("too small to decrypt"),
}

func (b *logBridge) Write(line []byte) (int, error) {
	for _, sign := range undecipherable {
		if bytes.Contains(line, sign) {
			b.metrics.gossip.WithLabelValues(gossipKey).Inc()
			b.warn()
			return len(line), nil
		}
	}
	b.log.DebugContext(b.ctx, "gossip", "text", string(bytes.TrimSpace(line)))
	return len(line), nil
}

func (b *logBridge) warn() {
	b.mu.Lock()
	due := time.Since(b.warned) >= warnEvery
	if due {
		b.warned = time.Now()
	}
	b.mu.Unlock()
	if due {
		b.log.WarnContext(b.ctx, "gossip with another key is refused", telemetry.Kind, gossipKey)
	}
}

// transport is memberlist's own, with a way to close its connections.
type transport struct {
	*memberlist.NetTransport
	reach   func(addr string) error
	dialing context.Context //nolint:containedctx // memberlist has none to pass; it ends with hangUp
	cancel  context.CancelFunc
	streams chan net.Conn
	ended   chan struct{}
	pump    sync.WaitGroup
	once    sync.Once

	mu      sync.Mutex
	stopped bool                  // +checklocks:mu
	conns   map[*tracked]struct{} // +checklocks:mu
}

type tracked struct {
	net.Conn
	t *transport
}

func (c *tracked) Close() error {
	c.t.mu.Lock()
	delete(c.t.conns, c)
	c.t.mu.Unlock()
	return c.Conn.Close()
}

func newTransport(ctx context.Context, inner *memberlist.NetTransport, reach func(string) error) *transport {
	if reach == nil {
		reach = func(string) error { return nil }
	}
	t := &transport{NetTransport: inner, reach: reach, streams: make(chan net.Conn), ended: make(chan struct{}), conns: map[*tracked]struct{}{}}
	t.dialing, t.cancel = context.WithCancel(context.WithoutCancel(ctx))
	t.pump.Go(t.forward) // Shutdown waits for it
	return t
}

// forward runs until memberlist's own goroutines have ended, which would block otherwise.
func (t *transport) forward() {
	for {
		select {
		case c := <-t.NetTransport.StreamCh():
			conn := t.track(c)
			select {
			case t.streams <- conn:
			case <-t.ended:
				_ = conn.Close()
			}
		case <-t.ended:
			return
		}
	}
}

func (t *transport) track(c net.Conn) net.Conn {
	conn := &tracked{Conn: c, t: t}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stopped {
		_ = c.Close()
	} else {
		t.conns[conn] = struct{}{}
	}
	return conn
}

// hangUp closes all connections; new ones are closed at once.
func (t *transport) hangUp() {
	t.cancel()
	t.mu.Lock()
	t.stopped = true
	conns := t.conns
	t.conns = map[*tracked]struct{}{}
	t.mu.Unlock()
	for c := range conns {
		_ = c.Conn.Close()
	}
}

func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (t *transport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if t.reach(a.Addr) != nil {
		return time.Now(), nil //nolint:nilerr // lost on the way, as packets are
	}
	return t.NetTransport.WriteToAddress(b, a)
}

func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (t *transport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if err := t.reach(a.Addr); err != nil {
		return nil, err
	}
	c, err := (&net.Dialer{Timeout: timeout}).DialContext(t.dialing, "tcp", a.Addr)
	if err != nil {
		return nil, fmt.Errorf("dial member: %w", err)
	}
	return t.track(c), nil
}

func (t *transport) Shutdown() error {
	t.hangUp()
	err := t.NetTransport.Shutdown()
	t.once.Do(func() { close(t.ended) })
	t.pump.Wait()
	return err
}
