package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"

	"github.com/barchan-dev/barchan/internal/control/webhooks"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// hookReceiver has what a webhook was sent.
type hookReceiver struct {
	*httptest.Server
	mu     sync.Mutex
	ids    map[string][]string // of events, by sandbox and type
	faults []string
}

func newHookReceiver() *hookReceiver {
	r := &hookReceiver{ids: map[string][]string{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		var e struct{ ID, Type, SandboxID string }
		err := json.Unmarshal(body, &e)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil || req.Header.Get("e2b-signature") != webhooks.Signature("secret", body) {
			r.faults = append(r.faults, fmt.Sprint(err, req.Header))
		}
		key := e.SandboxID + " " + e.Type
		if !slices.Contains(r.ids[key], e.ID) {
			r.ids[key] = append(r.ids[key], e.ID)
		}
	}))
	return r
}

// once returns an error unless one event of the type has come, maybe several times.
func (r *hookReceiver) once(sandbox, kind string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if got := r.ids[sandbox+" sandbox.lifecycle."+kind]; len(got) != 1 || len(r.faults) > 0 {
		return fmt.Errorf("%d events of type %s have come for %s; faults %v", len(got), kind, sandbox, r.faults)
	}
	return nil
}

// notify makes a webhook, and a sandbox whose events it receives.
var notify = operation{
	name: "webhook", storeAfter: neverOnDisk,
	prepare: func(w *fixture) *subject {
		s := newSubject("webhook")
		s.hook = newHookReceiver()
		w.t.Cleanup(s.hook.Close)
		return s
	},
	do: func(ctx context.Context, w *fixture, s *subject) error {
		if err := makeHook(ctx, w, s); err != nil {
			return err
		}
		if err := create("cold")(ctx, w, s); err != nil {
			return err
		}
		for s.hook.once(s.id, "created") != nil {
			if err := shortPause(ctx); err != nil {
				return fmt.Errorf("%w: %w", err, s.hook.once(s.id, "created"))
			}
			if _, err := hooksOf(ctx, w, s); err != nil { // the server is gone
				return err
			}
		}
		return nil
	},
	check: func(w *fixture, s *subject) {
		w.meet(s.id)
		var list []struct{ Type string }
		if _, err := w.send(w.t.Context(), http.MethodGet, "/events/sandboxes/"+s.id, "", nil, &list); err != nil || len(list) != 1 || list[0].Type != "sandbox.lifecycle.created" {
			w.t.Errorf("the events of %s are %v, %v", s.id, list, err)
		}
	},
	cleanup: func(w *fixture, s *subject) {
		killSubject(w, s)
		eventually.NoError(w.t, "the webhook receives the end", func() error { return s.hook.once(s.id, "killed") })
		ids, err := hooksOf(w.t.Context(), w, s)
		w.need(err)
		for _, id := range ids {
			_, err := w.send(w.t.Context(), http.MethodDelete, "/events/webhooks/"+id, "", nil, nil)
			w.need(err)
		}
	},
}

// hooksOf returns the webhooks of a subject.
func hooksOf(ctx context.Context, w *fixture, s *subject) (ids []string, err error) {
	var list []struct{ ID, Name string }
	_, err = w.send(ctx, http.MethodGet, "/events/webhooks", "", nil, &list)
	for _, h := range list {
		if h.Name == s.name {
			ids = append(ids, h.ID)
		}
	}
	return ids, err
}

// makeHook makes the webhook of a subject once.
func makeHook(ctx context.Context, w *fixture, s *subject) error {
	have, err := hooksOf(ctx, w, s)
	if err != nil || len(have) > 0 {
		return err
	}
	_, err = w.send(ctx, http.MethodPost, "/events/webhooks", "", map[string]any{
		"name": s.name, "url": s.hook.URL, "signatureSecret": "secret", "events": []string{"sandbox.lifecycle.created", "sandbox.lifecycle.killed"},
	}, nil)
	return err
}
