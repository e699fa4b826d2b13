package adminapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// stream writes events, one JSON object a line, each sent at once.
type stream struct {
	mu sync.Mutex
	// +checklocks:mu
	enc   *json.Encoder
	flush func() error
}

func (s *stream) send(e adminclient.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A client that has gone ends the work through the request's context.
	if s.enc.Encode(e) == nil {
		_ = s.flush()
	}
}

// run does the work and ends the stream with what came of it.
func (a *API) run(w http.ResponseWriter, r *http.Request, work func(ctx context.Context, progress func(adminclient.Event)) (adminclient.Result, error)) {
	control := http.NewResponseController(w)
	// A tar is still being read when the first progress is reported. Only tests
	// have a writer that cannot.
	_ = control.EnableFullDuplex()
	w.Header().Set("Content-Type", "application/x-ndjson")
	s := &stream{enc: json.NewEncoder(w), flush: control.Flush}
	result, err := work(r.Context(), s.send)
	if err != nil {
		a.log.WarnContext(r.Context(), "admin work ended in an error", telemetry.Path, r.URL.Path, telemetry.Error, err)
		s.send(adminclient.Event{Error: wire(err)})
		return
	}
	s.send(adminclient.Event{Result: &result})
}

func (a *API) removeImage(w http.ResponseWriter, r *http.Request) {
	force := false
	if text := r.URL.Query().Get("force"); text != "" {
		var err error
		if force, err = strconv.ParseBool(text); err != nil {
			a.refuse(w, r, fmt.Errorf("force: %q is neither true nor false: %w", text, errs.ErrInvalid))
			return
		}
	}
	if err := a.cfg.Images.Remove(r.Context(), r.PathValue("ref"), force); err != nil {
		a.refuse(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *API) buildImage(w http.ResponseWriter, r *http.Request) {
	var req adminclient.BuildImageRequest
	if err := decode(w, r, &req); err != nil {
		a.refuse(w, r, err)
		return
	}
	a.run(w, r, func(ctx context.Context, progress func(adminclient.Event)) (adminclient.Result, error) {
		image, err := a.cfg.Build.BuildImage(ctx, req, progress)
		return adminclient.Result{Images: []adminclient.Image{image}}, err
	})
}

func (a *API) prune(w http.ResponseWriter, r *http.Request) {
	var req adminclient.PruneRequest
	err := decode(w, r, &req)
	var gone []adminclient.Image
	if err == nil {
		gone, err = a.cfg.Images.Prune(r.Context(), req)
	}
	a.answer(w, r, orEmpty(gone), err)
}

func (a *API) pull(w http.ResponseWriter, r *http.Request) {
	var req adminclient.PullRequest
	err := decode(w, r, &req)
	if err == nil && req.Ref == "" {
		err = fmt.Errorf("ref: is empty, want an image such as docker.io/library/debian:stable: %w", errs.ErrInvalid)
	}
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	a.run(w, r, func(ctx context.Context, progress func(adminclient.Event)) (adminclient.Result, error) {
		image, err := a.cfg.Images.Pull(ctx, req, progress)
		return adminclient.Result{Images: []adminclient.Image{image}}, err
	})
}

func (a *API) importTar(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	a.run(w, r, func(ctx context.Context, progress func(adminclient.Event)) (adminclient.Result, error) {
		images, err := a.cfg.Images.Import(ctx, r.Body, name, progress)
		return adminclient.Result{Images: images}, err
	})
}

// shutdown stops the server only if what comes before it succeeded. With All
// that continues even if the client disconnects: half a removal has no use.
func (a *API) shutdown(w http.ResponseWriter, r *http.Request) {
	var req adminclient.ShutdownRequest
	if err := decode(w, r, &req); err != nil {
		a.refuse(w, r, err)
		return
	}
	stopped := errors.New("not stopped")
	a.run(w, r, func(ctx context.Context, progress func(adminclient.Event)) (adminclient.Result, error) {
		stopped = a.cfg.Server.Prepare(context.WithoutCancel(ctx), req, progress)
		return adminclient.Result{}, stopped
	})
	if stopped == nil {
		a.cfg.Server.Stop()
	}
}
