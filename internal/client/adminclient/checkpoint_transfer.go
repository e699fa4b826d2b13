package adminclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strconv"
)

// Routes for the export and import of checkpoints.
const (
	PathCheckpointExport = "/v1/checkpoints/export"
	PathCheckpointImport = "/v1/checkpoints/import"
)

// Headers of an export's response, whose body is a tar: before it the tar's size in bytes, and
// warnings, a JSON array of texts; after it, if the tar is incomplete, the error.
const (
	HeaderProgress = "Barchan-Progress" // an Event, as JSON, in preceding responses of status 102
	HeaderTarSize  = "Barchan-Tar-Size"
	HeaderWarnings = "Barchan-Warnings"
	TrailerError   = "Barchan-Error" // an Error, as JSON
)

// CheckpointExport requests a checkpoint as a tar.
type CheckpointExport struct {
	Namespace, Name string
	// WithoutImage leaves out the base image.
	WithoutImage bool
	// AllowSecrets allows the export of memory that holds the variables of its sandbox's claim.
	AllowSecrets bool
}

// Query encodes the request as a URL's query.
func (e CheckpointExport) Query() url.Values {
	return url.Values{
		"namespace": {e.Namespace}, "name": {e.Name},
		"withoutImage": {strconv.FormatBool(e.WithoutImage)}, "allowSecrets": {strconv.FormatBool(e.AllowSecrets)},
	}
}

// CheckpointImport requests a checkpoint from a tar.
type CheckpointImport struct {
	Namespace string
	// Name is the new name; empty: the original one.
	Name string
}

// Query encodes the request as a URL's query.
func (i CheckpointImport) Query() url.Values {
	return url.Values{"namespace": {i.Namespace}, "name": {i.Name}}
}

// Imported is an imported checkpoint.
type Imported struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Warnings are reasons that may prevent a restore of its memory.
	Warnings []string `json:"warnings,omitempty"`
}

// Exported is a checkpoint being exported. Read it to its end, and close it.
type Exported struct {
	io.Reader
	// Size is bytes.
	Size     int64
	Warnings []string
	body     io.Closer
}

// Close releases the connection.
func (e *Exported) Close() error { return e.body.Close() }

// ExportCheckpoint requests a checkpoint as a tar. An incomplete tar is an error of the reader's.
// progress reports the server's progress before the tar begins, and is not called after the return.
func (c *Client) ExportCheckpoint(ctx context.Context, req CheckpointExport, progress func(Event)) (*Exported, error) {
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(_ int, header textproto.MIMEHeader) error {
		var e Event
		if json.Unmarshal([]byte(header.Get(HeaderProgress)), &e) == nil {
			progress(e)
		}
		return nil
	}})
	res, err := c.send(ctx, http.MethodPost, PathCheckpointExport+"?"+req.Query().Encode(), nil)
	if err != nil {
		return nil, err
	}
	size, err := strconv.ParseInt(res.Header.Get(HeaderTarSize), 10, 64)
	var warnings []string
	if text := res.Header.Get(HeaderWarnings); err == nil && text != "" {
		err = json.Unmarshal([]byte(text), &warnings)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("decode response of %s: %w", PathCheckpointExport, err), res.Body.Close())
	}
	return &Exported{Reader: &trailed{res}, Size: size, Warnings: warnings, body: res.Body}, nil
}

// trailed ends with the error of the trailer.
type trailed struct{ res *http.Response }

func (t *trailed) Read(b []byte) (int, error) {
	n, err := t.res.Body.Read(b)
	if !errors.Is(err, io.EOF) {
		return n, err
	}
	if text := t.res.Trailer.Get(TrailerError); text != "" {
		e := &Error{Code: http.StatusInternalServerError, Text: text}
		if json.Unmarshal([]byte(text), e) == nil {
			return n, mapError(e)
		}
		return n, e
	}
	return n, err
}

// ImportCheckpoint creates a checkpoint from a tar in this package's form.
func (c *Client) ImportCheckpoint(ctx context.Context, req CheckpointImport, tar io.Reader, progress func(Event)) (Imported, error) {
	result, err := c.upload(ctx, PathCheckpointImport+"?"+req.Query().Encode(), tar, progress)
	if err != nil {
		return Imported{}, err
	}
	if result.Checkpoint == nil {
		return Imported{}, fmt.Errorf("decode response of %s: it names no checkpoint", PathCheckpointImport)
	}
	return *result.Checkpoint, nil
}
