package agent

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"slices"
	"strconv"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/files"
	"github.com/barchan-dev/barchan/internal/guest/agent/process"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
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
	path, processes := processpb.NewProcessHandler(&process.RPC{Processes: a.processes, Users: a.users}, opts...)
	mux.Handle(path, reply.Combine(processes))
	mux.Handle(filesystempb.NewFilesystemHandler(
		&files.RPC{Users: a.users, Uploads: a.uploads, Watchers: a.watchers}, opts...))
	files := &files.HTTP{Users: a.users, Uploads: a.uploads}
	for route, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"GET " + envd.PathHealth:         reply.NoContent,
		"GET " + envd.PathMetrics:        a.getMetrics,
		"GET " + envd.PathMetricsHistory: a.getMetricsHistory,
		"GET " + envd.PathEnvs:           a.getEnvs,
		"GET " + envd.PathFiles:          files.Download,
		"POST " + envd.PathFiles:         files.Upload,
		"POST " + envd.PathCompose:       files.Compose,
		"POST " + envd.PathInit:          a.postInit,
		"POST " + envd.PathFreeze:        a.postFreeze,
		"POST " + envd.PathUnfreeze:      reply.NoContent,
		"POST " + envd.PathRestored:      a.postRestored,
		"POST " + envd.PathOOMKill:       a.postOOMKill,
		"GET " + envd.PathEntrypoint:     a.getEntrypoint,
		"GET " + envd.PathIdentity:       a.getIdentity,
		"GET " + envd.PathLogs:           a.getLogs,
		"GET " + envd.PathPorts:          a.getPorts,
		"GET " + envd.PathConnect:        a.getConnect,
		"GET " + envd.PathSFTP:           a.getSFTP,
		"POST " + envd.PathRestart:       a.postRestart,
		// The runtime API of agent-sandbox's clients.
		"POST /execute":           a.postExecute,
		"POST /upload":            files.Upload,
		"GET /download/{path...}": atPath(files.Download),
		"GET /list/{path...}":     atPath(a.getList),
		"GET /exists/{path...}":   atPath(a.getExists),
	} {
		mux.Handle(route, reply.Handler(a.log, h))
	}
	mux.Handle(envd.PathContainers+"{container}/", http.HandlerFunc(a.toContainer))
	mux.Handle("/", reply.Handler(a.log, func(_ http.ResponseWriter, r *http.Request) error {
		return reply.Refuse(http.StatusNotFound, "no route %s %s", r.Method, r.URL.Path)
	}))
	return allowBrowsers(guard(a.settings, a.requests.track(earlyResponse(mux))))
}

// earlyResponse lets a stream of input over HTTP/1.1 fail before the client has ended it. Its connection is
// not used again: net/http breaks the next request of a connection whose request body ends after the
// handler, if the handler had full duplex.
func earlyResponse(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 && r.URL.Path == processpb.ProcessStreamInputProcedure {
			w.Header().Set("Connection", "close")
			_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1.1 supports it
		}
		next.ServeHTTP(w, r)
	})
}

func (a *Agent) getMetrics(w http.ResponseWriter, _ *http.Request) error {
	m, err := a.meter.Measure()
	if err != nil {
		return err
	}
	return reply.JSON(w, m)
}

func (a *Agent) getMetricsHistory(w http.ResponseWriter, r *http.Request) error {
	since, err := strconv.ParseInt(r.URL.Query().Get(envd.QuerySince), 10, 64)
	if err != nil {
		return reply.Refuse(http.StatusBadRequest, "%s: want seconds since 1970", envd.QuerySince)
	}
	return reply.JSON(w, a.history.Samples(since))
}

func (a *Agent) getEnvs(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, a.settings.Envs())
}

func (a *Agent) getEntrypoint(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, a.entrypoint.status())
}

// getIdentity proves to a client which sandbox this is; see envd.PathIdentity.
func (a *Agent) getIdentity(w http.ResponseWriter, r *http.Request) error {
	nonce := r.URL.Query().Get(envd.QueryNonce)
	if len(nonce) < envd.MinNonce || len(nonce) > envd.MaxNonce {
		return reply.Refuse(http.StatusBadRequest, "%s: want %d to %d bytes", envd.QueryNonce, envd.MinNonce, envd.MaxNonce)
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	addr, err := envd.AddrOf(local)
	if err != nil {
		return err
	}
	proof := a.settings.Prove(nonce, addr)
	if proof == (envd.IdentityProof{}) {
		return reply.Refuse(http.StatusServiceUnavailable, "the agent does not know its token yet")
	}
	return reply.JSON(w, proof)
}

// postOOMKill kills the process with the most memory. The node asks for it at the sandbox's limit.
func (a *Agent) postOOMKill(w http.ResponseWriter, r *http.Request) error {
	killed, ok := a.oom.Kill()
	if !ok {
		return reply.Refuse(http.StatusNotFound, "no process has memory but the agent")
	}
	a.log.WarnContext(r.Context(), "out of memory: process killed", "pid", killed.PID, "name", killed.Name, "bytes", killed.Bytes, "others", killed.Others)
	return reply.JSON(w, killed)
}

// postInit takes what is known only once the sandbox has an owner.
func (a *Agent) postInit(w http.ResponseWriter, r *http.Request) error {
	var req envd.InitRequest
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	if err := checkBundle(req.CABundle); err != nil {
		return reply.WithStatus(http.StatusBadRequest, err)
	}
	applied, err := a.settings.Apply(req, r.Header.Get(envd.HeaderAccessToken))
	switch {
	case errors.Is(err, settings.ErrToken):
		return reply.WithStatus(http.StatusUnauthorized, err)
	case errors.Is(err, settings.ErrInvalid):
		return reply.WithStatus(http.StatusBadRequest, err)
	case err != nil:
		return err
	}
	if applied && req.CABundle != "" {
		if err := a.trust.install(req.CABundle); err != nil {
			return err
		}
	}
	return reply.NoContent(w, r)
}

// postFreeze writes to disk what is in memory. The freezing itself is the
// node's, from outside, with the OCI runtime.
func (a *Agent) postFreeze(w http.ResponseWriter, r *http.Request) error {
	unix.Sync()
	return reply.NoContent(w, r)
}

// getLogs streams lines as NDJSON, oldest first.
func (a *Agent) getLogs(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	source, follow := q.Get("source"), q.Get("follow")
	if !slices.Contains([]string{"", envd.SourceEntrypoint, envd.SourceAgent}, source) {
		return reply.Refuse(http.StatusBadRequest, "source: %q is neither %s nor %s", source, envd.SourceEntrypoint, envd.SourceAgent)
	}
	if !slices.Contains([]string{"", "true", "false", "1", "0"}, follow) {
		return reply.Refuse(http.StatusBadRequest, "follow: %q is neither true nor false", follow)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Trailer", envd.TrailerError)
	enc := json.NewEncoder(w)
	rc := http.NewResponseController(w)
	var seq uint64
	for {
		lines, next, update := a.buffer.From(seq)
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
			if err := context.Cause(r.Context()); errors.Is(err, reply.ErrRestored) {
				w.Header().Set(envd.TrailerError, err.Error())
			}
			return nil
		}
	}
}
