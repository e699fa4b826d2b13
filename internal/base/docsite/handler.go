package docsite

import (
	"fmt"
	"net/http"
	"path"
	"strings"
	"sync"

	"github.com/barchan-dev/barchan"
	"github.com/barchan-dev/barchan/internal/base/webfile"
)

// Path is where a server shows the site; everything below it is the site's, too.
const Path = "/docs"

// csp lets pages load the site's own files and nothing else.
const csp = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// pictureCSP is that of pictures, which have styles and load nothing.
const pictureCSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

// Handler serves the site of the program's own documents below Path, to any client: all of it is public. The site is made by the
// first request, so that a server without readers spends nothing on it.
func Handler() http.Handler {
	files := sync.OnceValues(func() (map[string]*webfile.File, error) {
		site, err := Build(barchan.Documents)
		if err != nil {
			return nil, err
		}
		files := make(map[string]*webfile.File, len(site.Files))
		for name, content := range site.Files {
			files[name] = webfile.New(name, content)
		}
		return files, nil
	})
	return webfile.Reads(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Content-Security-Policy", csp)
		name, below := strings.CutPrefix(r.URL.Path, Path+"/")
		if !below {
			http.Redirect(w, r, Path+"/", http.StatusFound)
			return
		}
		if name == "" || strings.HasSuffix(name, "/") {
			name += FirstPage
		}
		all, err := files()
		if err != nil { // not for a released program: a test builds the site
			http.Error(w, fmt.Sprintf("the site cannot be made: %v", err), http.StatusInternalServerError)
			return
		}
		if f := all[name]; f != nil {
			if path.Ext(name) == picture {
				h.Set("Content-Security-Policy", pictureCSP)
			}
			f.ServeHTTP(w, r)
			return
		}
		http.Error(w, "no such page; "+Path+"/ has them all", http.StatusNotFound)
	})
}
