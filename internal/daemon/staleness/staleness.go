// Package staleness bounds the age of a replica's routes: it proves by the watch itself up to when all changes have been applied.
//
// It does not change routes: it reports until when they may be trusted, and restarts a watch that proves nothing.
//
// Locks: ShortWatches.mu only; no call is made while it is held.
package staleness

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// staleAfter is how long a replica routes to sandboxes after a proof. An address cools down for a minute
// (node.DefaultCoolDown) before another sandbox may have it: a route that was right 40 s ago cannot lead to another sandbox,
// and an admitted request has 20 s left to connect. It is long enough for a restart of the API server to go unnoticed.
const staleAfter = 40 * time.Second

// envStaleAfter shortens staleAfter, for tests that cannot wait so long. It never lengthens it.
const envStaleAfter = "BARCHAN_TEST_STALE_AFTER"

// Divisors of staleAfter.
const (
	// watchShare gives the length of a watch: API servers send a bookmark 2 s before its end, but otherwise once a minute,
	// which would be too late for a proof.
	watchShare = 4
	// proofShare gives the interval of probes.
	proofShare = 20
)

// conditionWatch names the watch among what may be wrong.
const conditionWatch = "watch"

// watchProber finds up to when a watch has brought all changes. It reads the API server's current version, never from a
// cache, and waits until the watch has passed it: all earlier changes have then been applied, even if there were no events.
// A response of the server alone proves nothing.
type watchProber struct {
	log   *slog.Logger
	stale time.Duration
	// latest returns the API server's current version; passed returns the version that the watch has passed.
	latest, passed func(ctx context.Context) (string, error)
	// trust receives after each probe until when the watch may be trusted.
	trust func(until time.Time)
	// renew restarts the watch.
	renew func()

	queried  []versionProbe // not passed yet, in their order
	before   string         // what the watch had passed at the previous probe
	proved   time.Time
	renewed  time.Time
	patience time.Duration // with a watch that proves nothing
}

type versionProbe struct {
	at      time.Time
	version string
}

// run probes until ctx is done.
func (p *watchProber) run(ctx context.Context) error {
	return lifecycle.Every(ctx, p.stale/proofShare, func() { p.probe(ctx) })
}

func (p *watchProber) probe(ctx context.Context) {
	p.settle()
	// What the watch has passed is used at the next probe: its events may not have been delivered yet.
	if version, err := p.passed(ctx); err == nil {
		p.before = version
	}
	p.trust(p.proved.Add(p.stale))
	p.query(ctx)
	p.restartStaleWatch(ctx)
}

// query adds a version of the server, unless it does not answer in time.
func (p *watchProber) query(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, p.stale/8)
	defer cancel()
	at := time.Now()
	version, err := p.latest(limited)
	if err != nil {
		p.log.DebugContext(ctx, "API server version not read", telemetry.Error, err)
		return
	}
	p.queried = append(p.queried, versionProbe{at, version})
}

// settle removes the versions that the watch has passed, which are proofs, and those too old to prove anything.
func (p *watchProber) settle() {
	kept := p.queried[:0]
	for _, q := range p.queried {
		order, err := resourceversion.CompareResourceVersion(p.before, q.version)
		switch {
		case err == nil && order >= 0:
			p.proved, p.patience = q.at, p.usualPatience()
		case time.Since(q.at) < p.stale:
			kept = append(kept, q)
		}
	}
	p.queried = kept
}

// usualPatience is half as long again as a watch lasts.
func (p *watchProber) usualPatience() time.Duration { return p.stale / watchShare * 3 / 2 }

// restartStaleWatch restarts a watch that has proved nothing for a while, each time with more patience: its list may be long.
func (p *watchProber) restartStaleWatch(ctx context.Context) {
	since := p.proved
	if p.renewed.After(since) {
		since = p.renewed
	}
	if time.Since(since) < p.patience {
		return
	}
	p.log.DebugContext(ctx, "restarting stale watch", "proved", p.proved)
	p.renewed, p.patience = time.Now(), max(p.usualPatience(), min(2*p.patience, 10*p.stale))
	p.renew()
}

// Config is what [New] needs.
type Config struct {
	Log *slog.Logger
	// Stale is how long the routes may be trusted after a proof.
	Stale time.Duration
	// Began is before the first list of the watch.
	Began time.Time
	// Live reads from the API server itself.
	Live client.Reader
	// Passed returns the version up to which the watch has brought all changes of sandboxes.
	Passed  func(ctx context.Context) (string, error)
	Watches *ShortWatches
	// Trust receives after each probe until when the routes may be trusted. Nil: their age does not matter.
	Trust func(until time.Time)
	// Gate gets a condition while nothing younger than Stale is proved.
	Gate *health.Gate
}

// Run probes the watch until ctx is done.
func Run(ctx context.Context, cfg Config) error { return newProber(cfg).run(ctx) }

func newProber(cfg Config) *watchProber {
	return &watchProber{
		log: cfg.Log, stale: cfg.Stale, proved: cfg.Began, renew: cfg.Watches.renew,
		renewed: time.Now(), patience: cfg.Stale / proofShare * 3 / 2, // the first watch was not made short
		latest: func(ctx context.Context) (string, error) {
			// A name that does not exist: only the version is read. Without a limit, the API server answers from its own
			// watch cache once that has come so far, and bookmarks with it.
			var list agents.SandboxList
			err := cfg.Live.List(ctx, &list, client.InNamespace("default"), client.MatchingFields{"metadata.name": "barchan.proof"})
			return list.ResourceVersion, err
		},
		passed: cfg.Passed,
		trust: func(until time.Time) {
			effect := "no new sandboxes are created"
			if cfg.Trust != nil {
				cfg.Trust(until)
				effect = "sandboxes are not served"
			}
			var err error
			if !time.Now().Before(until) {
				err = errs.Public(nil, fmt.Sprintf("no news from the API server for %s; %s until its watch recovers", cfg.Stale, effect))
			}
			cfg.Gate.Set(conditionWatch, err)
		},
	}
}

// Limit returns the age after which routes may not be used: staleAfter, or a shorter time for tests.
func Limit() (time.Duration, error) {
	text := os.Getenv(envStaleAfter)
	if text == "" {
		return staleAfter, nil
	}
	short, err := time.ParseDuration(text)
	if err != nil || short < 12*time.Second || short > staleAfter { // a watch of less than 3 s has no bookmarks
		return 0, fmt.Errorf("%s: want 12s to %s, not %.20q: %w", envStaleAfter, staleAfter, text, errs.ErrInvalid)
	}
	return short, nil
}

// NewShortWatches returns watches that end often enough to prove that nothing older than stale is served.
func NewShortWatches(stale time.Duration) *ShortWatches {
	return &ShortWatches{length: stale / watchShare}
}

// ShortWatches limits the length of the watch of sandboxes. Its reader continues with a new watch where the last one ended.
type ShortWatches struct {
	length time.Duration

	mu  sync.Mutex
	end context.CancelFunc // of the current watch; +checklocks:mu
}

// Wrap is for rest.Config.
func (s *ShortWatches) Wrap(next http.RoundTripper) http.RoundTripper {
	return watchTripper{s, next}
}

// renew ends the current watch, if there is one.
func (s *ShortWatches) renew() {
	s.mu.Lock()
	end := s.end
	s.mu.Unlock()
	if end != nil {
		end()
	}
}

type watchTripper struct {
	watches *ShortWatches
	next    http.RoundTripper
}

// RoundTrip implements http.RoundTripper. A watch that lists all first may take its time.
func (t watchTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	query := req.URL.Query()
	if !strings.HasSuffix(req.URL.Path, "/sandboxes") || query.Get("watch") == "" {
		return t.next.RoundTrip(req)
	}
	ctx, end := context.WithCancel(req.Context())
	req = req.Clone(ctx)
	if query.Get("sendInitialEvents") != "true" {
		query.Set("timeoutSeconds", strconv.Itoa(int(t.watches.length/time.Second)))
		req.URL.RawQuery = query.Encode()
	}
	t.watches.mu.Lock()
	t.watches.end = end
	t.watches.mu.Unlock()
	res, err := t.next.RoundTrip(req)
	if err != nil {
		end()
		return nil, err
	}
	res.Body = watchBody{res.Body, ctx, end}
	return res, nil
}

// watchBody ends as the server's would where renew has ended it.
type watchBody struct {
	io.ReadCloser
	ctx context.Context //nolint:containedctx // of the request whose answer this is
	end context.CancelFunc
}

// Read implements io.Reader.
func (b watchBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && b.ctx.Err() != nil {
		err = io.EOF
	}
	return n, err
}

// Close implements io.Closer.
func (b watchBody) Close() error {
	b.end()
	return b.ReadCloser.Close()
}

// Dial sets up connections that notice within stale/2 that nothing comes through them, where
// Go's HTTP/2 takes 45 s and TCP a quarter of an hour.
func Dial(cfg *rest.Config, stale time.Duration) {
	dead := stale / 4
	d := &net.Dialer{
		Timeout:         dead,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: dead / 2, Interval: max(dead/8, time.Second), Count: 4},
		Control: func(_, _ string, c syscall.RawConn) error {
			var bad error
			err := c.Control(func(fd uintptr) {
				bad = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(dead/time.Millisecond))
			})
			if err == nil {
				err = bad
			}
			return err
		},
	}
	cfg.Dial = d.DialContext
}
