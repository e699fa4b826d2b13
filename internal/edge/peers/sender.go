package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
)

const (
	sendTimeout  = 5 * time.Second
	firstRetry   = 50 * time.Millisecond
	longestRetry = 5 * time.Second
)

// sender sends a member's queue to one process of it, over one connection.
type sender struct {
	log     *slog.Logger
	metrics *metrics
	from    string
	boot    string
	to      Member
	queue   *push.Queue
	batch   int
	delay   time.Duration
	trust   *trust.Trust
	dial    func(ctx context.Context, network, addr string) (net.Conn, error)
	// seq numbers the batches of this process over all its senders: a member that was wrongly believed
	// dead has received the previous sender's batches, and accepts only newer ones.
	seq *atomic.Uint64
}

// run sends until ctx is done. Unsent routes stay in the queue.
func (s *sender) run(ctx context.Context) {
	transport := &http.Transport{
		DialContext:        s.dial,
		TLSClientConfig:    s.trust.Client(s.to.Name),
		MaxConnsPerHost:    1,
		DisableCompression: true,
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: sendTimeout}

	// An empty batch first: it opens the connection before the first route comes.
	for retry := firstRetry; ctx.Err() == nil; {
		if s.send(ctx, client, nil) {
			break
		}
		retry = pause(ctx, retry, longestRetry)
	}
	for s.wait(ctx) {
		s.drain(ctx, client)
	}
}

// wait returns when there is something to send, after FlushDelay if the batch may grow meanwhile, and
// false when ctx is done.
func (s *sender) wait(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-s.queue.Wake:
	}
	if s.delay <= 0 || s.queue.Len() >= s.batch {
		return true
	}
	timer := time.NewTimer(s.delay)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-s.queue.Wake:
			if s.queue.Len() >= s.batch {
				return true
			}
		}
	}
}

// drain sends until the queue is empty or ctx is done.
func (s *sender) drain(ctx context.Context, client *http.Client) {
	retry := firstRetry
	for ctx.Err() == nil {
		taken := s.queue.Take(s.batch)
		if len(taken) == 0 {
			return
		}
		if s.send(ctx, client, taken) {
			retry = firstRetry
			continue
		}
		s.lose(lostOverflow, s.queue.PutBack(taken))
		retry = pause(ctx, retry, longestRetry)
	}
}

// pause waits for a time about as long as given, and returns the next.
func pause(ctx context.Context, d, longest time.Duration) time.Duration {
	timer := time.NewTimer(jitter(d))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return min(2*d, longest)
}

// jitter spreads a duration over half to one and a half of it.
func jitter(d time.Duration) time.Duration {
	return d/2 + rand.N(d+1) //nolint:gosec // not a secret
}

// send reports whether the routes are done: accepted by the member, or never acceptable.
func (s *sender) send(ctx context.Context, client *http.Client, routes []*push.Route) bool {
	body, n := s.encode(ctx, routes)
	if n == 0 && len(routes) > 0 {
		return true
	}
	start := time.Now()
	status, err := s.post(ctx, client, body)
	switch {
	case ctx.Err() != nil:
		return false
	case err == nil && status == http.StatusNoContent:
		s.metrics.took.Observe(time.Since(start).Seconds())
		s.metrics.batches.WithLabelValues(resultOK).Inc()
		s.metrics.pushed.Add(float64(n))
		return true
	case err == nil && (status == http.StatusBadRequest || status == http.StatusRequestEntityTooLarge):
		// A member of another version. The same batch would be rejected again.
		s.metrics.batches.WithLabelValues(resultRejected).Inc()
		s.lose(lostRefused, n)
		s.log.WarnContext(ctx, "member refuses a batch", telemetry.Peer, s.to.Name, telemetry.Status, status, telemetry.Count, n)
		return true
	default:
		s.metrics.batches.WithLabelValues(resultFailed).Inc()
		s.log.DebugContext(ctx, "member not told, retrying", telemetry.Peer, s.to.Name, telemetry.Status, status, telemetry.Error, err)
		return false
	}
}

// encode permanently omits routes that no member would accept.
func (s *sender) encode(ctx context.Context, routes []*push.Route) (body []byte, n int) {
	b := push.Batch{Version: push.Version, From: s.from, Boot: s.boot, To: s.to.Boot, Seq: s.seq.Add(1), Routes: make([]push.Record, 0, len(routes))}
	for _, r := range routes {
		w := push.RecordOf(r)
		if err := w.Check(); err != nil {
			s.lose(lostInvalid, 1)
			s.log.WarnContext(ctx, "route not sent", telemetry.Sandbox, r.ID, telemetry.Error, err)
			continue
		}
		b.Routes = append(b.Routes, w)
	}
	body, err := json.Marshal(b)
	if err != nil { // all its types can be encoded
		s.log.ErrorContext(ctx, "batch cannot be encoded", telemetry.Error, err)
		return nil, 0
	}
	return body, len(b.Routes)
}

func (s *sender) post(ctx context.Context, client *http.Client, body []byte) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+s.to.Push.String()+refreshPath, bytes.NewReader(body))
	if err != nil {
		return 0, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := client.Do(req) //nolint:bodyclose // discard closes it
	if err != nil {
		return 0, fmt.Errorf("push: %w", err)
	}
	discard(resp.Body)
	return resp.StatusCode, nil
}

func (s *sender) lose(reason string, n int) {
	if n > 0 {
		s.metrics.onLeave.WithLabelValues(reason).Add(float64(n))
	}
}
