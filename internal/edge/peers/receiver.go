package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
)

const (
	refreshPath = "/refresh"
	contentType = "application/json"

	maxConns      = 512
	maxHeader     = 8 << 10
	headerTimeout = 5 * time.Second // the handshake included
	bodyTimeout   = 10 * time.Second
	idleTimeout   = 10 * time.Minute
	stopTimeout   = time.Second
	// maxHeard bounds the table of known senders. Beyond it those that left are removed, and a batch
	// of such a process might be accepted once more if it rejoins unchanged.
	maxHeard = 4 * maxMembers
)

// rejection is why a batch is rejected: metric label, status, and the expected value for the sender.
type rejection struct {
	reason string
	status int
	err    error
}

// receiver accepts batches.
type receiver struct {
	log      *slog.Logger
	metrics  *metrics
	boot     string
	member   func(name string) (Member, bool)
	onRoutes func(from string, batch []push.Route)

	mu    sync.Mutex
	heard map[string]lastBatch // +checklocks:mu
}

// lastBatch is the last batch accepted from a member.
type lastBatch struct {
	boot string
	seq  uint64
}

// serve ends when ctx is done and all handlers have returned.
func (v *receiver) serve(ctx context.Context, l net.Listener, trust *trust.Trust) error {
	// Counted when accepted: counting in the handler might be too late.
	var conns sync.WaitGroup
	defer conns.Wait()
	srv := &http.Server{
		Handler: v,
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			conns.Add(1)
			return ctx
		},
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed {
				conns.Done()
			}
		},
		TLSConfig:         trust.Server(func(reason string) { v.metrics.refused.WithLabelValues(reason).Inc() }),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       bodyTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(v.log.Handler(), slog.LevelDebug), // errors caused by strangers
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	var stopping sync.WaitGroup
	defer stopping.Wait()
	ended := make(chan struct{})
	defer close(ended)
	stopping.Go(func() {
		select {
		case <-ctx.Done():
		case <-ended:
		}
		quiet, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		_ = errors.Join(srv.Shutdown(quiet), srv.Close())
	})
	err := srv.ServeTLS(netutil.LimitListener(l, maxConns), "", "")
	if errors.Is(err, http.ErrServerClosed) && ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("serve pushes: %w", err)
}

// ServeHTTP accepts a batch whole or not at all. The connection has been authenticated.
func (v *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	from, routes, no := v.read(req)
	if no != nil {
		v.metrics.refused.WithLabelValues(no.reason).Inc()
		v.log.DebugContext(req.Context(), "batch refused", telemetry.Peer, from, telemetry.Reason, no.reason, telemetry.Error, no.err)
		w.Header().Set("Connection", "close")
		http.Error(w, no.err.Error(), no.status)
		return
	}
	if len(routes) > 0 {
		v.onRoutes(from, routes)
		v.metrics.received.Add(float64(len(routes)))
	}
	w.WriteHeader(http.StatusNoContent)
}

func (v *receiver) read(req *http.Request) (from string, routes []push.Route, no *rejection) {
	kind, _, _ := mime.ParseMediaType(req.Header.Get("Content-Type"))
	switch {
	case req.TLS == nil || len(req.TLS.PeerCertificates) == 0:
		return "", nil, &rejection{trust.RefusedNoCertificate, http.StatusUnauthorized, errors.New("no certificate shown")}
	case req.URL.Path != refreshPath:
		return "", nil, &rejection{refusedRequest, http.StatusNotFound, errors.New("only " + refreshPath + " is here")}
	case req.Method != http.MethodPost:
		return "", nil, &rejection{refusedRequest, http.StatusMethodNotAllowed, errors.New("only POST is taken")}
	case kind != contentType:
		return "", nil, &rejection{refusedRequest, http.StatusUnsupportedMediaType, errors.New("only " + contentType + " is taken")}
	case req.ContentLength > push.MaxBody:
		return "", nil, &rejection{refusedSize, http.StatusRequestEntityTooLarge, fmt.Errorf("batch of more than %d bytes", push.MaxBody)}
	}
	b, err := push.ReadBatch(req.Body)
	switch {
	case errors.Is(err, errs.ErrTooLarge):
		return "", nil, &rejection{refusedSize, http.StatusRequestEntityTooLarge, err}
	case err != nil:
		return "", nil, &rejection{refusedMalformed, http.StatusBadRequest, err}
	case !trust.SpeaksFor(req.TLS.PeerCertificates[0], b.From):
		return "", nil, &rejection{refusedName, http.StatusForbidden, fmt.Errorf("the certificate is not that of %.100q", b.From)}
	}
	routes, no = v.admit(b)
	return b.From, routes, no
}

// admit checks a member's statements about itself, and records the batch as accepted.
func (v *receiver) admit(b *push.Batch) ([]push.Route, *rejection) {
	m, ok := v.member(b.From)
	switch {
	case !ok:
		return nil, &rejection{refusedMember, http.StatusForbidden, fmt.Errorf("%q is not a member", b.From)}
	case b.Boot != m.Boot:
		return nil, &rejection{refusedBoot, http.StatusConflict, fmt.Errorf("%q is known in another life than boot says", b.From)}
	case b.To != v.boot:
		return nil, &rejection{refusedBoot, http.StatusConflict, errors.New("to is another life than this process")}
	}
	routes, err := b.Take()
	switch {
	case errors.Is(err, errs.ErrTooLarge):
		return nil, &rejection{refusedRoutes, http.StatusRequestEntityTooLarge, err}
	case err != nil:
		return nil, &rejection{refusedMalformed, http.StatusBadRequest, err}
	case !v.first(b):
		return nil, &rejection{refusedReplay, http.StatusConflict, fmt.Errorf("seq %d or a later one was taken already", b.Seq)}
	}
	return routes, nil
}

// first reports whether a batch is newer than all accepted ones of the same process.
func (v *receiver) first(b *push.Batch) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if last, ok := v.heard[b.From]; ok && last.boot == b.Boot && b.Seq <= last.seq {
		return false
	}
	if _, ok := v.heard[b.From]; !ok && len(v.heard) >= maxHeard {
		v.forgetLocked()
	}
	v.heard[b.From] = lastBatch{b.Boot, b.Seq}
	return true
}

// +checklocks:v.mu
func (v *receiver) forgetLocked() {
	for name := range v.heard {
		if _, ok := v.member(name); !ok {
			delete(v.heard, name)
		}
	}
}

// discard reads the rest of a body, so that the connection can be reused.
func discard(body io.ReadCloser) {
	_, _ = io.Copy(io.Discard, io.LimitReader(body, maxHeader))
	_ = body.Close()
}
