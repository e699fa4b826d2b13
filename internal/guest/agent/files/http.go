// Package files serves E2B's filesystem API: RPCs, downloads, uploads and watches. It works as root
// for any user that a request names: it guards no files from a client that has the token.
//
// Lock order: Watchers.mu, then watcher.mu; Uploads.mu is a leaf.
package files

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/klauspost/compress/gzip"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// compressFrom is the smallest file that is worth compressing.
const compressFrom = 1400

// HTTP serves the contents of files.
type HTTP struct {
	Users   settings.Users
	Uploads *Uploads
}

// authorize checks the token or a signature, and returns the request's user.
func (s *HTTP) authorize(r *http.Request, op envd.Operation) (account.User, error) {
	q := r.URL.Query()
	known := s.Users.Settings
	if !known.IsOpen() {
		if token := r.Header.Get(envd.HeaderAccessToken); token != "" {
			if !known.Accepts(token) {
				return account.User{}, reply.WithStatus(http.StatusUnauthorized, settings.ErrToken)
			}
		} else if err := checkSignature(known, q, op); err != nil {
			return account.User{}, reply.WithStatus(http.StatusUnauthorized, err)
		}
	}
	acc, err := s.Users.Named(q.Get(envd.QueryUsername))
	if err != nil {
		return account.User{}, reply.WithStatus(http.StatusUnauthorized, err)
	}
	return acc, nil
}

func checkSignature(s *settings.Settings, q url.Values, op envd.Operation) error {
	var expiry *time.Time
	if text := q.Get(envd.QueryExpiration); text != "" {
		sec, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return envd.ErrSignatureInvalid
		}
		t := time.Unix(sec, 0)
		expiry = &t
	}
	return s.Verify(q.Get(envd.QuerySignature), q.Get(envd.QueryPath), op, q.Get(envd.QueryUsername), expiry)
}

// Download serves GET and HEAD.
func (s *HTTP) Download(w http.ResponseWriter, r *http.Request) error {
	acc, err := s.authorize(r, envd.OpRead)
	if err != nil {
		return err
	}
	_, workdir := s.Users.Settings.Defaults()
	path, err := account.ResolvePath(r.URL.Query().Get(envd.QueryPath), acc, workdir)
	if err != nil {
		return reply.WithStatus(http.StatusBadRequest, err)
	}
	// Without O_NONBLOCK, opening a named pipe would wait for its writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return openError(path, err)
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return fmt.Errorf("stat file: %w", err)
	}
	if st.IsDir() {
		return reply.Refuse(http.StatusBadRequest, "path '%s' is a directory", path)
	}
	if !st.Mode().IsRegular() {
		return reply.Refuse(http.StatusBadRequest, "path '%s' is not a regular file", path)
	}
	zip, err := wantsGzip(r.Header)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Vary", "Accept-Encoding")
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	if h.Get("Content-Disposition") == "" {
		h.Set("Content-Disposition", "inline")
	}
	if zip && st.Size() >= compressFrom && !conditional(r.Header) && r.Method == http.MethodGet {
		return sendGzip(w, path, f)
	}
	if st.Size() == 0 && r.Method == http.MethodGet {
		return sendUnsized(w, path, f)
	}
	http.ServeContent(w, r, filepath.Base(path), st.ModTime(), f)
	return nil
}

// sendUnsized serves files with size zero, such as those of /proc.
func sendUnsized(w http.ResponseWriter, path string, f *os.File) error {
	w.Header().Set("Content-Type", contentType(path))
	if _, err := io.Copy(w, f); err != nil {
		// Too late for a status: abort the stream.
		panic(http.ErrAbortHandler)
	}
	return nil
}

func openError(path string, err error) error {
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return reply.Refuse(http.StatusNotFound, "path '%s' does not exist", path)
	case errors.Is(err, syscall.ENXIO):
		return reply.Refuse(http.StatusBadRequest, "path '%s' is not a regular file", path)
	case errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		return reply.WithStatus(http.StatusBadRequest, err)
	case errors.Is(err, os.ErrPermission):
		return reply.WithStatus(http.StatusForbidden, err)
	}
	return fmt.Errorf("open file: %w", err)
}

// conditional reports whether the answer may be a part or nothing, which is
// relative to the plain content.
func conditional(h http.Header) bool {
	for _, k := range []string{"Range", "If-Range", "If-Modified-Since", "If-Unmodified-Since", "If-None-Match", "If-Match"} {
		if h.Get(k) != "" {
			return true
		}
	}
	return false
}

func contentType(path string) string {
	if t := mime.TypeByExtension(filepath.Ext(path)); t != "" {
		return t
	}
	return "application/octet-stream"
}

func sendGzip(w http.ResponseWriter, path string, f io.Reader) error {
	w.Header().Set("Content-Encoding", "gzip")
	w.Header().Set("Content-Type", contentType(path))
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return fmt.Errorf("compress: %w", err)
	}
	_, err = io.Copy(z, f)
	if err = errors.Join(err, z.Close()); err != nil {
		// Too late for a status: abort the stream.
		panic(http.ErrAbortHandler)
	}
	return nil
}

// wantsGzip reads Accept-Encoding: gzip if it is liked no less than the plain
// content, an error if neither is taken.
func wantsGzip(h http.Header) (bool, error) {
	quality, err := qualities(strings.Join(h.Values("Accept-Encoding"), ","))
	if err != nil {
		return false, err
	}
	star, hasStar := quality["*"]
	zip, hasZip := quality["gzip"]
	if !hasZip && hasStar {
		zip = star
	}
	plain, hasPlain := quality["identity"]
	if !hasPlain && (!hasStar || star > 0) {
		// Always acceptable, yet with lower priority than what is named.
		return hasZip && zip > 0, nil
	}
	if plain == 0 && zip == 0 {
		return false, reply.Refuse(http.StatusNotAcceptable, "no acceptable encoding: identity and gzip are offered")
	}
	return zip > 0 && zip >= plain, nil
}

// qualities reads a list of names, each with a quality or 1.
func qualities(header string) (map[string]float64, error) {
	quality := map[string]float64{}
	for item := range strings.SplitSeq(header, ",") {
		name, params, _ := strings.Cut(item, ";")
		q := 1.0
		if v, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			parsed, err := strconv.ParseFloat(v, 64)
			if err != nil || !(parsed >= 0 && parsed <= 1) {
				return nil, reply.Refuse(http.StatusBadRequest, "Accept-Encoding: %q is not a quality", v)
			}
			q = parsed
		}
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			quality[name] = q
		}
	}
	return quality, nil
}
