package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/inflight"
)

const (
	// UploadTime bounds an upload. It is that of the SDKs.
	UploadTime = time.Hour
	// uploadPause bounds the wait for the next bytes of one.
	uploadPause = 30 * time.Second
	// bodyTime bounds how long other bodies may take.
	bodyTime = time.Minute
	// smallBody is up to what size there may be any number of bodies of one namespace, and largeBodies how many others.
	smallBody   = 64 << 10
	largeBodies = 32
)

// Bodies bounds the large bodies that the server keeps for each namespace. The zero value is ready.
type Bodies struct{ large inflight.Counter[string] }

// Take counts a body of a length, negative if it is unknown, until done is called. Beyond the limit it returns an errs.ErrExhausted.
func (b *Bodies) Take(namespace string, length int64) (done func(), err error) {
	if length >= 0 && length <= smallBody {
		return func() {}, nil
	}
	if _, ok := b.large.Take(namespace, largeBodies); !ok {
		return nil, errs.Public(errs.ErrExhausted, fmt.Sprintf("the namespace has %d requests with large bodies in progress; try again later", largeBodies))
	}
	return func() { b.large.Release(namespace) }, nil
}

// PacedBody returns the body of an upload, which must not stop for long, and must end within a time. net/http closes the body.
func PacedBody(w http.ResponseWriter, r *http.Request, within time.Duration) io.Reader {
	return &pacedBody{Reader: r.Body, control: http.NewResponseController(w), until: time.Now().Add(within)}
}

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

// ReadBody reads the whole body of at most limit bytes first, so that its errors are reported before any change is made.
func ReadBody(w http.ResponseWriter, r *http.Request, limit int64) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, io.NopCloser(PacedBody(w, r, bodyTime)), limit))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return errs.Public(errs.ErrTooLarge, fmt.Sprintf("the body is larger than %d bytes", limit))
	}
	if err != nil {
		return errs.Public(fmt.Errorf("%w: %w", errs.ErrInvalid, err), "the body could not be read")
	}
	body = bytes.TrimSpace(body)
	if len(body) > 0 {
		var raw json.RawMessage
		if err := json.Unmarshal(body, &raw); err != nil {
			return BadBody(err)
		}
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return nil
}
