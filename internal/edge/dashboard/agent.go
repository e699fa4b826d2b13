package dashboard

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"time"

	"connectrpc.com/connect"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

const (
	maxUpload  = 1 << 30
	maxEntries = 5000
	// portsTimeout bounds the wait for an agent, which a tenant may have replaced.
	portsTimeout = 5 * time.Second
)

type port struct {
	Port    uint16 `json:"port"`
	Address string `json:"address"`
	Process string `json:"process,omitempty"`
	URL     string `json:"url"`
}

// ports lists what listens in a sandbox. It does not count as use, and wakes nothing.
func (s *Server) ports(w http.ResponseWriter, r *http.Request, who caller) error {
	o, err := s.running(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	agent, err := s.cfg.Agent(o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), portsTimeout)
	defer cancel()
	found, err := agent.Ports(ctx)
	if err != nil {
		return agentError(err)
	}
	all := make([]port, len(found))
	for i, p := range found {
		all[i] = port{Port: p.Port, Address: p.Address, Process: p.Process, URL: s.portURL(r, sandbox.IDOf(o.UID), strconv.Itoa(int(p.Port)))}
	}
	return writeJSON(w, all)
}

// openFor is how long the signed URL of a private sandbox's port gives access.
const openFor = 10 * time.Minute

// openPort leads a browser to a port of a sandbox. The URL of a private sandbox is signed. As it gives access without a key, the audit
// log has it.
func (s *Server) openPort(w http.ResponseWriter, r *http.Request, who caller) error {
	o, err := s.find(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	number, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || number == 0 || number == envd.Port {
		return request.Invalid("port: must be a number from 1 to 65535, and not the agent's")
	}
	v := s.cfg.View(o)
	to := s.portURL(r, v.ID, strconv.FormatUint(number, 10))
	if v.TrafficToken != "" {
		to += "?" + signedurl.Query(v.TrafficToken, uint16(number), time.Now().Add(openFor)).Encode()
		s.record(r, who.Identity, actionPort, http.StatusSeeOther)
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
	return nil
}

// followLog streams the log of a sandbox's program, or of a container besides the first, and then what it writes. It does
// not count as use.
func (s *Server) followLog(w http.ResponseWriter, r *http.Request, who caller) error {
	o, err := s.running(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	container, follow := r.FormValue("container"), s.cfg.FollowLog
	if follow == nil {
		agent, err := s.cfg.Agent(o)
		if err == nil && container != "" {
			agent, err = agent.Container(container)
		}
		if err != nil {
			return err
		}
		follow = func(ctx context.Context, _ *agents.Sandbox, _, source string, each func(envd.LogLine) error) error {
			return agent.Logs(ctx, source, true, each)
		}
	}
	source := envd.SourceEntrypoint
	switch r.FormValue("source") {
	case "all":
		source = ""
	case envd.SourceAgent:
		source = envd.SourceAgent
	}
	ctx, cancel := s.live(r.Context(), who)
	defer cancel()
	out := newLines(w)
	if err := http.NewResponseController(w).Flush(); err != nil {
		return errors.Join(errSent, err)
	}
	err = follow(ctx, o, container, source, func(l envd.LogLine) error { return out.send(l) })
	return errors.Join(errSent, err)
}

// visited is the work of a request that uses a sandbox: it wakes it, and counts for its idle policy.
func (s *Server) visited(r *http.Request, who caller, work func(ctx context.Context, agent *envd.Client) error) error {
	o, err := s.find(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	visit, err := s.cfg.Visit(r.Context(), sandbox.IDOf(o.UID))
	if err != nil {
		return visitError(err)
	}
	defer visit.End()
	agent, err := visit.Agent("")
	if err != nil {
		return err
	}
	return agentError(work(r.Context(), agent))
}

// visitError gives a local reply of the gateway the kind of its status.
func visitError(err error) error {
	var local *reply.Reply
	if !errors.As(err, &local) {
		return err
	}
	kind := errs.ErrUnavailable
	switch local.Status {
	case http.StatusConflict, http.StatusBadGateway:
		kind = errs.ErrConflict
	case http.StatusForbidden:
		kind = errs.ErrForbidden
	case http.StatusTooManyRequests:
		kind = errs.ErrExhausted
	}
	return errs.Public(kind, local.Message)
}

// agentError gives an error of an agent its kind. Its text is the agent's, which is for the sandbox's owner.
func agentError(err error) error {
	if err == nil || errors.Is(err, errSent) || errs.Kind(err) != nil {
		return err
	}
	kinded := agentclient.AnswerError(err)
	e := envd.ErrorOf(err)
	if e == nil {
		return kinded
	}
	kind := errs.Kind(kinded)
	switch e.Status {
	case http.StatusNotFound:
		kind = errs.ErrNotFound
	case http.StatusBadRequest:
		kind = errs.ErrInvalid
	case http.StatusForbidden:
		kind = errs.ErrForbidden
	case http.StatusConflict:
		kind = errs.ErrConflict
	}
	return errs.Public(kind, e.Message)
}

type entry struct {
	Name     string    `json:"name"`
	Path     string    `json:"path"`
	Dir      bool      `json:"dir,omitempty"`
	Link     string    `json:"link,omitempty"`
	Size     int64     `json:"size"`
	Mode     string    `json:"mode"`
	Owner    string    `json:"owner"`
	Modified time.Time `json:"modified"`
}

func pathOf(r *http.Request) (string, error) {
	p := r.FormValue("path")
	if !path.IsAbs(p) {
		return "", request.Invalid("path: must be absolute")
	}
	return path.Clean(p), nil
}

func (s *Server) listFiles(w http.ResponseWriter, r *http.Request, who caller) error {
	at, err := pathOf(r)
	if err != nil {
		return err
	}
	var all []entry
	err = s.visited(r, who, func(ctx context.Context, agent *envd.Client) error {
		answer, err := agent.Filesystem().ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: at, Depth: 1}))
		if err != nil {
			return err
		}
		for _, e := range answer.Msg.GetEntries() {
			all = append(all, entry{
				Name: e.GetName(), Path: e.GetPath(), Dir: e.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY, Link: e.GetSymlinkTarget(),
				Size: e.GetSize(), Mode: e.GetPermissions(), Owner: e.GetOwner(), Modified: e.GetModifiedTime().AsTime(),
			})
		}
		return nil
	})
	if err != nil {
		return err
	}
	return writeJSON(w, map[string]any{"path": at, "entries": all[:min(len(all), maxEntries)], "more": max(0, len(all)-maxEntries)})
}

// download sends a file, which no browser shows as a page of this origin.
func (s *Server) download(w http.ResponseWriter, r *http.Request, who caller) error {
	at, err := pathOf(r)
	if err != nil {
		return err
	}
	return s.visited(r, who, func(ctx context.Context, agent *envd.Client) error {
		body, err := agent.Download(ctx, at)
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": path.Base(at)}))
		if _, err = io.Copy(w, body); err != nil {
			panic(http.ErrAbortHandler) // half a file must not look like a whole one
		}
		return nil
	})
}

func (s *Server) uploadFile(w http.ResponseWriter, r *http.Request, who caller) error {
	at, err := pathOf(r)
	if err != nil {
		return err
	}
	if r.ContentLength > maxUpload {
		return errs.Public(errs.ErrTooLarge, "the file is larger than 1 GiB; use barchan cp")
	}
	s.Log.InfoContext(r.Context(), "dashboard upload", telemetry.Namespace, who.Namespace, telemetry.Name, who.Key, telemetry.Sandbox, r.PathValue("id"))
	return s.visited(r, who, func(ctx context.Context, agent *envd.Client) error {
		info, err := agent.Upload(ctx, at, http.MaxBytesReader(w, r.Body, maxUpload), nil)
		if err != nil {
			return err
		}
		return writeJSON(w, info)
	})
}

func (s *Server) makeDirectory(w http.ResponseWriter, r *http.Request, who caller) error {
	at, err := pathOf(r)
	if err != nil {
		return err
	}
	return s.visited(r, who, func(ctx context.Context, agent *envd.Client) error {
		if _, err := agent.Filesystem().MakeDir(ctx, connect.NewRequest(&filesystempb.MakeDirRequest{Path: at})); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
}

func (s *Server) removeFile(w http.ResponseWriter, r *http.Request, who caller) error {
	at, err := pathOf(r)
	if err != nil {
		return err
	}
	return s.visited(r, who, func(ctx context.Context, agent *envd.Client) error {
		if _, err := agent.Filesystem().Remove(ctx, connect.NewRequest(&filesystempb.RemoveRequest{Path: at})); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
}
