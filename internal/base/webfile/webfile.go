// Package webfile serves files that are part of the program: with an ETag, and packed for clients that take
// gzip. It reads nothing from disk and sets no header of security, which is up to its users.
package webfile

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"
	"sync"
)

// File is a file as it is sent. It is an http.Handler, and safe for concurrent use.
type File struct {
	text       []byte
	packed     func() []byte
	kind, etag string
}

// kinds do not depend on the machine's table.
var kinds = map[string]string{
	".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".svg": "image/svg+xml",
}

// New makes a file of a name, whose extension gives its content type, and a text, which must not change afterwards.
func New(name string, text []byte) *File {
	sum := sha256.Sum256(text)
	kind := kinds[path.Ext(name)]
	if kind == "" {
		kind = mime.TypeByExtension(path.Ext(name))
	}
	packed := sync.OnceValue(func() []byte { return pack(text) })
	return &File{text: text, packed: packed, kind: kind, etag: `"` + hex.EncodeToString(sum[:8]) + `"`}
}

// Text returns the content, which must not be changed.
func (f *File) Text() []byte { return f.text }

// Kind returns the content type.
func (f *File) Kind() string { return f.kind }

// ServeHTTP sends the file, or 304 to a client that has it.
func (f *File) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.kind)
	h.Set("Cache-Control", "no-cache")
	h.Set("ETag", f.etag)
	h.Set("Vary", "Accept-Encoding")
	if r.Header.Get("If-None-Match") == f.etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	body := f.text
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		if packed := f.packed(); len(packed) < len(body) {
			h.Set("Content-Encoding", "gzip")
			body = packed
		}
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body) // the client may be gone
}

func pack(text []byte) []byte {
	var packed bytes.Buffer
	w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the level is valid
	_, _ = w.Write(text)                                       // memory takes all
	_ = w.Close()
	return packed.Bytes()
}

// Reads refuses methods that change something with 405: no preflight of another origin is answered.
func Reads(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
			return
		}
		h(w, r)
	}
}
