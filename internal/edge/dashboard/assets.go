package dashboard

import (
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
)

//go:embed web
var web embed.FS

// asset is a file of the page, as it is sent.
type asset struct {
	plain, packed []byte
	kind, etag    string
}

// kinds do not depend on the machine's table.
var kinds = map[string]string{
	".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".svg": "image/svg+xml",
}

func readAssets() (map[string]*asset, error) {
	found := map[string]*asset{}
	err := fs.WalkDir(web, "web", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := web.ReadFile(name)
		if err != nil {
			return err
		}
		var packed bytes.Buffer
		w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the level is valid
		if _, err := w.Write(text); err != nil {
			return err
		}
		if err := w.Close(); err != nil {
			return err
		}
		sum := sha256.Sum256(text)
		kind := kinds[path.Ext(name)]
		if kind == "" {
			kind = mime.TypeByExtension(path.Ext(name))
		}
		found[strings.TrimPrefix(name, "web/")] = &asset{plain: text, packed: packed.Bytes(), kind: kind, etag: `"` + hex.EncodeToString(sum[:8]) + `"`}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the dashboard's files: %w", err)
	}
	return found, nil
}

func (s *Server) serveAsset(w http.ResponseWriter, r *http.Request) {
	a := s.assets[strings.TrimPrefix(r.URL.Path, "/ui/assets/")]
	if a == nil {
		http.Error(w, "no such file", http.StatusNotFound)
		return
	}
	a.send(w, r)
}

// csp lets the page load its own files and nothing else. The nonce is for the style elements of the terminal.
const csp = "default-src 'self'; script-src 'self'; style-src 'self' 'nonce-%s'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// serveIndex sends the page, whose scripts read the rest of the path.
func (s *Server) serveIndex(w http.ResponseWriter, _ *http.Request) {
	nonce := rand.Text()
	page := *s.assets["index.html"]
	page.plain, page.packed = bytes.Replace(page.plain, []byte("NONCE"), []byte(nonce), 1), nil
	w.Header().Set("Content-Security-Policy", fmt.Sprintf(csp, nonce))
	w.Header().Set("Content-Type", page.kind)
	_, _ = w.Write(page.plain) // the client may be gone
}

func (a *asset) send(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", a.kind)
	h.Set("Cache-Control", "no-cache")
	h.Set("ETag", a.etag)
	h.Set("Vary", "Accept-Encoding")
	if r.Header.Get("If-None-Match") == a.etag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	body := a.plain
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") && len(a.packed) < len(body) {
		h.Set("Content-Encoding", "gzip")
		body = a.packed
	}
	_, _ = w.Write(body) // the client may be gone
}
