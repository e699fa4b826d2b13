package adminapi

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// exportImage answers with a tar, whose headers are written with its first bytes: until then an error is a response of its own.
func (a *API) exportImage(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	req := adminclient.ImageExport{Namespace: q.Get("namespace"), Source: q.Get("source"), Name: q.Get("name")}
	if req.Namespace == "" || req.Source == "" {
		a.refuse(w, r, fmt.Errorf("namespace %q and source %q: want both: %w", req.Namespace, req.Source, errs.ErrInvalid))
		return
	}
	out := &tarWriter{ResponseWriter: w}
	err := a.cfg.Images.Export(r.Context(), req, out)
	switch {
	case err != nil && !out.begun:
		a.refuse(w, r, err)
	case err != nil:
		a.log.WarnContext(r.Context(), "export of an image ended in an error", telemetry.Error, err)
		if text, err := json.Marshal(wire(err)); err == nil {
			w.Header().Set(adminclient.TrailerError, string(text))
		}
	}
}

// tarWriter is the body of a response with a tar.
type tarWriter struct {
	http.ResponseWriter
	begun bool
}

// Write writes the headers first.
func (t *tarWriter) Write(b []byte) (int, error) {
	if !t.begun {
		t.begun = true
		t.Header().Set("Content-Type", "application/x-tar")
		t.Header().Set("Trailer", adminclient.TrailerError)
	}
	return t.ResponseWriter.Write(b)
}
