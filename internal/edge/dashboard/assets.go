package dashboard

import (
	"bytes"
	"crypto/rand"
	"embed"
	"fmt"
	"io/fs"
	"net/http"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/webfile"
)

//go:embed web
var web embed.FS

// readAssets returns the files of the page.
func readAssets() (map[string]*webfile.File, error) {
	found := map[string]*webfile.File{}
	err := fs.WalkDir(web, "web", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := web.ReadFile(name)
		found[strings.TrimPrefix(name, "web/")] = webfile.New(name, text)
		return err
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
	a.ServeHTTP(w, r)
}

// csp lets the page load its own files and nothing else. The nonce is for the style elements of the terminal.
const csp = "default-src 'self'; script-src 'self'; style-src 'self' 'nonce-%s'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// serveIndex sends the page, whose scripts read the rest of the path.
func (s *Server) serveIndex(w http.ResponseWriter, _ *http.Request) {
	nonce := rand.Text()
	page := s.assets["index.html"]
	w.Header().Set("Content-Security-Policy", fmt.Sprintf(csp, nonce))
	w.Header().Set("Content-Type", page.Kind())
	_, _ = w.Write(bytes.Replace(page.Text(), []byte("NONCE"), []byte(nonce), 1)) // the client may be gone
}
