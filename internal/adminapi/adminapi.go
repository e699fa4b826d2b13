// Package adminapi serves the administration of one server on a unix socket
// that only the server's own user may open: status, images, addresses, shutdown. It
// decides nothing: each request becomes one call on what it was given.
package adminapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// Server is the server that is administered; package daemon has it.
type Server interface {
	// Status may be requested at any time from the first phase of the boot.
	Status(ctx context.Context) (adminclient.Status, error)
	// Doctor runs diagnostic checks.
	Doctor(ctx context.Context) ([]adminclient.Check, error)
	// Prepare does what must be done before the server ends: with req.All it
	// ends and removes every sandbox. Repeating it is harmless.
	Prepare(ctx context.Context, req adminclient.ShutdownRequest, progress func(adminclient.Event)) error
	// Stop has the server end soon, and returns at once.
	Stop()
}

// Images keeps images; all of it may answer errs.ErrUnavailable during the boot.
type Images interface {
	List(ctx context.Context) ([]adminclient.Image, error)
	Pull(ctx context.Context, req adminclient.PullRequest, progress func(adminclient.Event)) (adminclient.Image, error)
	// Import reads an OCI layout or a `docker save` from a tar.
	Import(ctx context.Context, tar io.Reader, name string, progress func(adminclient.Event)) ([]adminclient.Image, error)
	// Export writes an image as a tar.
	Export(ctx context.Context, req adminclient.ImageExport, w io.Writer) error
	// Prune removes images that nothing uses.
	Prune(ctx context.Context, req adminclient.PruneRequest) ([]adminclient.Image, error)
	// Remove refuses with an errs.ErrConflict what is in use; with force templates do not count.
	Remove(ctx context.Context, ref string, force bool) error
}

// ImageBuilder makes images and puts them among the others.
type ImageBuilder interface {
	BuildImage(ctx context.Context, req adminclient.BuildImageRequest, progress func(adminclient.Event)) (adminclient.Image, error)
}

// Config has the parts of an API. All of it is needed but for Audit, Diagnostics, Addresses, Egress and Checkpoints.
type Config struct {
	Socket string
	Server Server
	Images Images
	Build  ImageBuilder
	// Audit compares the server's records with each other; nil disables it.
	Audit func(ctx context.Context) ([]adminclient.Finding, error)
	// Diagnostics returns the inside of the server, also during the boot; nil disables it.
	Diagnostics func(ctx context.Context) (adminclient.Diagnostics, error)
	// Addresses and Egress are of a server that runs sandboxes itself; without them there are no
	// such routes.
	Addresses Addresses
	Egress    Egress
	// Peers are there on every server; without them there are no such routes.
	Peers Peers
	// Checkpoints are of a server that runs sandboxes itself; without them there are no such routes.
	Checkpoints Checkpoints
	// RotateSecrets replaces the key of Secrets, and returns how many were encrypted again. It is of a server with an API server.
	RotateSecrets func(ctx context.Context) (int, error)
	// Wrap is around the handler of all routes; nil: nothing is.
	Wrap func(http.Handler) http.Handler
	Log  *slog.Logger
}

// API serves the administration.
type API struct {
	cfg Config
	log *slog.Logger
}

// New checks the configuration and opens nothing.
func New(cfg Config) (*API, error) {
	switch {
	case !filepath.IsAbs(cfg.Socket):
		return nil, fmt.Errorf("admin socket %q: want an absolute path: %w", cfg.Socket, errs.ErrInvalid)
	case cfg.Server == nil || cfg.Images == nil || cfg.Build == nil || cfg.Log == nil:
		return nil, fmt.Errorf("admin API: server, images, build and log are needed: %w", errs.ErrInvalid)
	}
	return &API{cfg: cfg, log: cfg.Log.With(telemetry.Component, "adminapi")}, nil
}

// maxRequest bounds a JSON body; a tar has no bound but the disk.
const maxRequest = 1 << 20

// Run serves until ctx is done. The caller holds the data directory's lock: a
// socket that is there already was left behind, and is replaced.
func (a *API) Run(ctx context.Context) error {
	h := a.Handler()
	if a.cfg.Wrap != nil {
		h = a.cfg.Wrap(h)
	}
	return Serve(ctx, Socket{Path: a.cfg.Socket, GID: -1}, h, a.log)
}

// Handler serves the routes, for Run and for tests.
func (a *API) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+adminclient.PathStatus, func(w http.ResponseWriter, r *http.Request) {
		s, err := a.cfg.Server.Status(r.Context())
		a.answer(w, r, s, err)
	})
	mux.HandleFunc("GET "+adminclient.PathDoctor, func(w http.ResponseWriter, r *http.Request) {
		checks, err := a.cfg.Server.Doctor(r.Context())
		a.answer(w, r, orEmpty(checks), err)
	})
	if a.cfg.Audit != nil {
		mux.HandleFunc("GET "+adminclient.PathAudit, func(w http.ResponseWriter, r *http.Request) {
			found, err := a.cfg.Audit(r.Context())
			a.answer(w, r, orEmpty(found), err)
		})
	}
	if a.cfg.Diagnostics != nil {
		mux.HandleFunc("GET "+adminclient.PathDiagnostics, func(w http.ResponseWriter, r *http.Request) {
			d, err := a.cfg.Diagnostics(r.Context())
			a.answer(w, r, d, err)
		})
	}
	mux.HandleFunc("GET "+adminclient.PathImages, func(w http.ResponseWriter, r *http.Request) {
		images, err := a.cfg.Images.List(r.Context())
		a.answer(w, r, orEmpty(images), err)
	})
	mux.HandleFunc("POST "+adminclient.PathImageExport, a.exportImage)
	mux.HandleFunc("POST "+adminclient.PathPrune, a.prune)
	mux.HandleFunc("DELETE "+adminclient.PathImages+"/{ref}", a.removeImage)
	mux.HandleFunc("POST "+adminclient.PathBuildImage, a.buildImage)
	mux.HandleFunc("POST "+adminclient.PathPull, a.pull)
	mux.HandleFunc("POST "+adminclient.PathImport, a.importTar)
	mux.HandleFunc("POST "+adminclient.PathShutdown, a.shutdown)
	if a.cfg.RotateSecrets != nil {
		mux.HandleFunc("POST "+adminclient.PathRotateSecrets, func(w http.ResponseWriter, r *http.Request) {
			n, err := a.cfg.RotateSecrets(r.Context())
			a.answer(w, r, adminclient.Rotation{Written: n}, err)
		})
	}
	a.handleNet(mux)
	a.handlePeers(mux)
	a.handleCheckpoints(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		a.refuse(w, r, errs.Public(errs.ErrNotFound, "no route "+r.Method+" "+r.URL.Path))
	})
	return mux
}

func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

func (a *API) answer(w http.ResponseWriter, r *http.Request, body any, err error) {
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // the client has gone
}

// refuse returns the whole error: a client with access to the socket may read the log.
func (a *API) refuse(w http.ResponseWriter, r *http.Request, err error) {
	e := wire(err)
	a.log.WarnContext(r.Context(), "admin request refused", telemetry.Path, r.URL.Path, telemetry.Error, err)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Code)
	_ = json.NewEncoder(w).Encode(e) // the client has gone
}

// codes is the edge's table from kinds to HTTP.
var codes = map[error]int{
	errs.ErrInvalid:     http.StatusBadRequest,
	errs.ErrForbidden:   http.StatusForbidden,
	errs.ErrNotFound:    http.StatusNotFound,
	errs.ErrConflict:    http.StatusConflict,
	errs.ErrTooLarge:    http.StatusRequestEntityTooLarge,
	errs.ErrUnavailable: http.StatusServiceUnavailable,
	errs.ErrExhausted:   http.StatusInsufficientStorage,
	errs.ErrTimeout:     http.StatusGatewayTimeout,
}

func wire(err error) *adminclient.Error {
	code, ok := codes[errs.Kind(err)]
	if !ok {
		code = http.StatusInternalServerError
	}
	text, ok := errs.PublicMessage(err)
	if !ok {
		text = err.Error()
	}
	return &adminclient.Error{Code: code, Text: text}
}

// decode reads a JSON body; none at all is the zero value.
func decode(w http.ResponseWriter, r *http.Request, into any) error {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("request body: %w: %w", err, errs.ErrInvalid)
	}
	return nil
}
