package adminapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// Checkpoints lets checkpoints leave the machine, and come to it.
type Checkpoints interface {
	// Export describes a checkpoint as something to be written, and returns warnings for the recipient.
	// Until release is called it is not removed. progress receives how much has been read for that.
	Export(ctx context.Context, req adminclient.CheckpointExport, progress func(adminclient.Event)) (l *portable.Layout, warnings []string, release func(), err error)
	// Import makes a checkpoint of a tar.
	Import(ctx context.Context, req adminclient.CheckpointImport, tar io.Reader, progress func(adminclient.Event)) (adminclient.Imported, error)
}

func (a *API) handleCheckpoints(mux *http.ServeMux) {
	if a.cfg.Checkpoints == nil {
		return
	}
	mux.HandleFunc("POST "+adminclient.PathCheckpointExport, a.exportCheckpoint)
	mux.HandleFunc("POST "+adminclient.PathCheckpointImport, a.importCheckpoint)
}

func exportRequest(r *http.Request) (req adminclient.CheckpointExport, err error) {
	q := r.URL.Query()
	req.Namespace, req.Name = q.Get("namespace"), q.Get("name")
	for name, into := range map[string]*bool{"withoutImage": &req.WithoutImage, "allowSecrets": &req.AllowSecrets} {
		if text := q.Get(name); text != "" {
			if *into, err = strconv.ParseBool(text); err != nil {
				return req, fmt.Errorf("%s: %q, want true or false: %w", name, text, errs.ErrInvalid)
			}
		}
	}
	if req.Namespace == "" || req.Name == "" {
		return req, fmt.Errorf("namespace %q and name %q: want both: %w", req.Namespace, req.Name, errs.ErrInvalid)
	}
	return req, nil
}

func (a *API) exportCheckpoint(w http.ResponseWriter, r *http.Request) {
	req, err := exportRequest(r)
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	l, warnings, release, err := a.cfg.Checkpoints.Export(r.Context(), req, func(e adminclient.Event) {
		if text, err := json.Marshal(e); err == nil {
			w.Header().Set(adminclient.HeaderProgress, string(text))
			w.WriteHeader(http.StatusProcessing)
		}
	})
	w.Header().Del(adminclient.HeaderProgress)
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	defer release()
	text, err := json.Marshal(warnings)
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-tar")
	w.Header().Set("Trailer", adminclient.TrailerError)
	w.Header().Set(adminclient.HeaderTarSize, strconv.FormatInt(l.Size(), 10))
	w.Header().Set(adminclient.HeaderWarnings, string(text))
	if err := l.Write(r.Context(), w); err != nil {
		a.log.WarnContext(r.Context(), "export of a checkpoint ended in an error", telemetry.Error, err)
		if text, err := json.Marshal(wire(err)); err == nil {
			w.Header().Set(adminclient.TrailerError, string(text))
		}
	}
}

func (a *API) importCheckpoint(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	req := adminclient.CheckpointImport{Namespace: q.Get("namespace"), Name: q.Get("name")}
	if req.Namespace == "" {
		a.refuse(w, r, fmt.Errorf("namespace: is empty: %w", errs.ErrInvalid))
		return
	}
	a.run(w, r, func(ctx context.Context, progress func(adminclient.Event)) (adminclient.Result, error) {
		made, err := a.cfg.Checkpoints.Import(ctx, req, r.Body, progress)
		return adminclient.Result{Checkpoint: &made}, err
	})
}
