package e2b

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// uploadPath begins the path of the URL by which files of a build's steps are uploaded. The rest says what may be uploaded,
// and is signed, so that the request needs no key.
const uploadPath = "/templates/uploads/"

const (
	// uploadTime bounds an upload. It is that of the SDKs.
	uploadTime = time.Hour
	// uploadPause bounds the wait for the next bytes of one.
	uploadPause = 30 * time.Second
)

// serveUpload stores the body without holding it in memory.
func (s *Server) serveUpload(w http.ResponseWriter, r *http.Request, path string) {
	var err error
	switch {
	case s.manager.Builds == nil:
		_ = noBuilds{}.write(w)
		return
	case r.ContentLength < 0:
		writeError(w, http.StatusLengthRequired, "the request needs a Content-Length")
		return
	case r.ContentLength == 0:
		err = invalid("the archive is empty")
	default:
		body := &pacedBody{Reader: r.Body, control: http.NewResponseController(w), until: time.Now().Add(uploadTime)}
		err = s.manager.Builds.Upload(r.Context(), path, r.ContentLength, body)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// pacedBody is a body that must not stop for long, and must end in time.
type pacedBody struct {
	io.Reader
	control *http.ResponseController
	until   time.Time
}

// Read implements io.Reader. A failed one is an errs.ErrInvalid: the client is the cause.
func (b *pacedBody) Read(p []byte) (int, error) {
	next := time.Now().Add(uploadPause)
	if next.After(b.until) {
		next = b.until
	}
	if err := b.control.SetReadDeadline(next); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		_ = b.control.SetReadDeadline(time.Time{}) // what follows takes as long as it takes
	} else if err != nil {
		err = errs.Public(fmt.Errorf("%w: %w", errs.ErrInvalid, err), "the body ended early, or came too slowly")
	}
	return n, err
}

// originOf returns the scheme and the host by which a client reaches this API, maybe through a proxy.
func originOf(r *http.Request) string {
	first := func(header string) string {
		text, _, _ := strings.Cut(r.Header.Get(header), ",")
		return strings.TrimSpace(text)
	}
	scheme, host := "http", r.Host
	if r.TLS != nil || strings.EqualFold(first("X-Forwarded-Proto"), "https") {
		scheme = "https"
	}
	if forwarded := first("X-Forwarded-Host"); forwarded != "" {
		host = forwarded
	}
	return scheme + "://" + host
}
