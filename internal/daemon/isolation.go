package daemon

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
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

// staleAfter is how long a replica leads to sandboxes on what its watch has proved. An address
// rests for a minute (node.DefaultCoolDown) before another sandbox may have it: what was true 40 s
// ago can still not lead to a stranger, with 20 s left for a request that was let through to
// connect. And it is long enough for an API server to be started anew without anybody noticing.
const staleAfter = 40 * time.Second

// envStaleAfter shortens staleAfter, for tests that cannot wait so long. It never lengthens it.
const envStaleAfter = "BARCHAN_TEST_STALE_AFTER"

// The rest goes with staleAfter.
const (
	// A watch ends after a fourth, and begins again where it was: API servers send a bookmark 2 s
	// before such an end, but otherwise once a minute, which would be no proof in time.
	watchShare = 4
	// A proof is asked for each twentieth.
	proofShare = 20
)

// conditionWatch names the watch among what may be wrong.
const conditionWatch = "watch"

// proof finds out up to when a watch has brought all that happened. It asks the API server for the
// version of this moment, by a read that is never of a cache, and waits until the watch has passed
// that version: all that had happened when it asked has been applied then, however late the events
// came, and whether or not there were any. That the server answers proves nothing by itself.
type watchProber struct {
	log   *slog.Logger
	stale time.Duration
	// latest asks the API server for its version now; passed is how far the watch has come.
	latest, passed func(ctx context.Context) (string, error)
	// trust is told after each look until when the watch may be trusted.
	trust func(until time.Time)
	// renew begins the watch anew.
	renew func()

	asked    []versionProbe // not passed yet, in their order
	before   string         // what the watch had passed a turn ago
	proved   time.Time
	renewed  time.Time
	patience time.Duration // with a watch that proves nothing
}

type versionProbe struct {
	at      time.Time
	version string
}

// run looks until ctx is done.
func (p *watchProber) run(ctx context.Context) error {
	return lifecycle.Every(ctx, p.stale/proofShare, func() { p.look(ctx) })
}

func (p *watchProber) look(ctx context.Context) {
	p.settle()
	// What the watch has passed is applied a turn later: its events may still be on their way.
	if version, err := p.passed(ctx); err == nil {
		p.before = version
	}
	p.trust(p.proved.Add(p.stale))
	p.ask(ctx)
	p.restartStaleWatch(ctx)
}

// ask adds a question. There is none where the server does not answer in time.
func (p *watchProber) ask(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, p.stale/8)
	defer cancel()
	at := time.Now()
	version, err := p.latest(limited)
	if err != nil {
		p.log.DebugContext(ctx, "version of the API server not heard", telemetry.Error, err)
		return
	}
	p.asked = append(p.asked, versionProbe{at, version})
}

// settle takes the questions that the watch has answered, and forgets those that are too old to
// prove anything.
func (p *watchProber) settle() {
	kept := p.asked[:0]
	for _, q := range p.asked {
		order, err := resourceversion.CompareResourceVersion(p.before, q.version)
		switch {
		case err == nil && order >= 0:
			p.proved, p.patience = q.at, p.usualPatience()
		case time.Since(q.at) < p.stale:
			kept = append(kept, q)
		}
	}
	p.asked = kept
}

// usualPatience is half as long again as a watch lasts.
func (p *watchProber) usualPatience() time.Duration { return p.stale / watchShare * 3 / 2 }

// hurry begins a watch anew that has proved nothing for a while, each time with more patience: it
// may have much to list.
func (p *watchProber) restartStaleWatch(ctx context.Context) {
	since := p.proved
	if p.renewed.After(since) {
		since = p.renewed
	}
	if time.Since(since) < p.patience {
		return
	}
	p.log.DebugContext(ctx, "watch begun anew, since it proves nothing", "proved", p.proved)
	p.renewed, p.patience = time.Now(), max(p.usualPatience(), min(2*p.patience, 10*p.stale))
	p.renew()
}

// proveWatch has the routes of a replica trusted only as far as its watch proves. began is before
// its first list.
func (d *Daemon) proveWatch(began time.Time) *watchProber {
	return &watchProber{
		log: d.log, stale: d.stale, proved: began, renew: d.watches.renew,
		renewed: time.Now(), patience: d.stale / proofShare * 3 / 2, // the first watch was not made short
		latest: func(ctx context.Context) (string, error) {
			// One name, which nobody has: nothing is read but the version. Without a limit, the API
			// server answers from its own watch cache once that has come so far, and bookmarks with it.
			var list agents.SandboxList
			err := d.cache.Live().List(ctx, &list, client.InNamespace("default"), client.MatchingFields{"metadata.name": "barchan.proof"})
			return list.ResourceVersion, err
		},
		passed: func(ctx context.Context) (string, error) { return cache.Passed[*agents.Sandbox](ctx, d.cache) },
		trust: func(until time.Time) {
			d.routes.TrustUntil(until)
			var err error
			if !time.Now().Before(until) {
				err = errs.Public(nil, fmt.Sprintf("no news from the API server for %s; sandboxes are not served until there are", d.stale))
			}
			d.health.Set(conditionWatch, err)
		},
	}
}

// staleTime is staleAfter, or less.
func staleTime() (time.Duration, error) {
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

// shortWatches has the watch of sandboxes end often, by the server or by renew. Its reader is told
// that it is over, and goes on with a new one from where it was.
type shortWatches struct {
	length time.Duration

	mu  sync.Mutex
	end context.CancelFunc // of the current watch; +checklocks:mu
}

// wrap is for rest.Config.
func (s *shortWatches) wrap(next http.RoundTripper) http.RoundTripper {
	return watchTripper{s, next}
}

// renew ends the current watch, if there is one.
func (s *shortWatches) renew() {
	s.mu.Lock()
	end := s.end
	s.mu.Unlock()
	if end != nil {
		end()
	}
}

type watchTripper struct {
	watches *shortWatches
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

// dialWatched makes connections that notice within stale/2 that nothing comes through them, where
// Go's HTTP/2 takes 45 s and TCP a quarter of an hour.
func dialWatched(cfg *rest.Config, stale time.Duration) {
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
