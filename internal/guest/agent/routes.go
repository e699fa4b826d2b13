package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const (
	// maxMessage bounds a message of an RPC.
	maxMessage = 64 << 20
	// compressMessage is the smallest message that is compressed, for a client that takes it.
	compressMessage = 256 << 10
)

// handler has all routes.
func (a *Agent) handler() http.Handler {
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithCompressMinBytes(compressMessage)}
	mux := http.NewServeMux()
	mux.Handle(processpb.NewProcessHandler(&processService{processes: a.processes, users: a.users}, opts...))
	mux.Handle(filesystempb.NewFilesystemHandler(
		&filesystemService{users: a.users, uploads: a.uploads, watchers: a.watchers}, opts...))
	files := &fileService{users: a.users, uploads: a.uploads}
	for route, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"GET " + envd.PathHealth:     noContent,
		"GET " + envd.PathMetrics:    a.getMetrics,
		"GET " + envd.PathEnvs:       a.getEnvs,
		"GET " + envd.PathFiles:      files.download,
		"POST " + envd.PathFiles:     files.upload,
		"POST " + envd.PathCompose:   files.compose,
		"POST " + envd.PathInit:      a.postInit,
		"POST " + envd.PathFreeze:    a.postFreeze,
		"POST " + envd.PathUnfreeze:  noContent,
		"POST " + envd.PathRestored:  a.postRestored,
		"GET " + envd.PathEntrypoint: a.getEntrypoint,
		"GET " + envd.PathLogs:       a.getLogs,
		"GET " + envd.PathPorts:      a.getPorts,
		"GET " + envd.PathConnect:    a.getConnect,
	} {
		mux.Handle(route, answer(a.log, h))
	}
	mux.Handle("/", answer(a.log, func(_ http.ResponseWriter, r *http.Request) error {
		return refuse(http.StatusNotFound, "no route %s %s", r.Method, r.URL.Path)
	}))
	return allowBrowsers(guard(a.settings, a.requests.track(fullDuplex(mux))))
}

// fullDuplex lets HTTP/1.1 handlers answer before they have read all.
func fullDuplex(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 {
			// It fails only where it is not needed.
			_ = http.NewResponseController(w).EnableFullDuplex()
		}
		next.ServeHTTP(w, r)
	})
}

// answer turns a handler's error into an answer. What has no status of its
// own is logged, and told as the client needs it to mend the cause: it is the
// client's own sandbox.
func answer(log *slog.Logger, h func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := h(w, r)
		if err == nil {
			return
		}
		if known, ok := errors.AsType[*errStatus](err); ok {
			writeError(w, known.status, known.err)
			return
		}
		log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "error", err)
		writeError(w, http.StatusInternalServerError, err)
	})
}

func writeError(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client has gone if this fails.
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, err.Error()})
}

func writeJSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(b) // the client has gone if this fails
	return nil
}

func noContent(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set(envd.HeaderVersion, envd.Version)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Agent) getMetrics(w http.ResponseWriter, _ *http.Request) error {
	m, err := a.meter.measure()
	if err != nil {
		return err
	}
	return writeJSON(w, m)
}

func (a *Agent) getEnvs(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, a.settings.envs())
}

func (a *Agent) getEntrypoint(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, a.entrypoint.status())
}

// postInit takes what is known only once the sandbox has an owner.
func (a *Agent) postInit(w http.ResponseWriter, r *http.Request) error {
	var req envd.InitRequest
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	if err := checkBundle(req.CABundle); err != nil {
		return &errStatus{http.StatusBadRequest, err}
	}
	applied, err := a.settings.apply(req, r.Header.Get(envd.HeaderAccessToken))
	switch {
	case errors.Is(err, errToken):
		return &errStatus{http.StatusUnauthorized, err}
	case errors.Is(err, errInvalid):
		return &errStatus{http.StatusBadRequest, err}
	case err != nil:
		return err
	}
	if applied && req.CABundle != "" {
		if err := a.trust.install(req.CABundle); err != nil {
			return err
		}
	}
	return noContent(w, r)
}

// postFreeze writes to disk what is in memory. The freezing itself is the
// node's, from outside, with the OCI runtime.
func (a *Agent) postFreeze(w http.ResponseWriter, r *http.Request) error {
	unix.Sync()
	return noContent(w, r)
}

// getLogs streams lines as NDJSON, oldest first.
func (a *Agent) getLogs(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	source, follow := q.Get("source"), q.Get("follow")
	if !slices.Contains([]string{"", envd.SourceEntrypoint, envd.SourceAgent}, source) {
		return refuse(http.StatusBadRequest, "source: %q is neither %s nor %s", source, envd.SourceEntrypoint, envd.SourceAgent)
	}
	if !slices.Contains([]string{"", "true", "false", "1", "0"}, follow) {
		return refuse(http.StatusBadRequest, "follow: %q is neither true nor false", follow)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Trailer", envd.TrailerError)
	enc := json.NewEncoder(w)
	rc := http.NewResponseController(w)
	var seq uint64
	for {
		lines, next, update := a.book.from(seq)
		seq = next
		for _, l := range lines {
			if source != "" && l.Source != source {
				continue
			}
			if err := enc.Encode(l); err != nil {
				return nil //nolint:nilerr // the client has gone
			}
		}
		if err := rc.Flush(); err != nil {
			return nil //nolint:nilerr // the client has gone
		}
		if follow != "true" && follow != "1" {
			return nil
		}
		select {
		case <-update:
		case <-r.Context().Done():
			if err := context.Cause(r.Context()); errors.Is(err, errRestored) {
				w.Header().Set(envd.TrailerError, err.Error())
			}
			return nil
		}
	}
}
