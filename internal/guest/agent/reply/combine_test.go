package reply

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
)

// flushes is a response that notes what it has at each flush.
type flushes struct {
	*httptest.ResponseRecorder
	at []string
}

func (f *flushes) Flush() { f.at = append(f.at, f.Body.String()) }

func TestCombine(t *testing.T) {
	var w flushes
	w.ResponseRecorder = httptest.NewRecorder()
	Combine(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, part := range []string{"a", "b", "c"} {
			if part == "b" {
				Last(r.Context())
			}
			_, _ = io.WriteString(w, part)
			w.(http.Flusher).Flush()
		}
	})).ServeHTTP(&w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	if want := []string{"a"}; !slices.Equal(w.at, want) || w.Body.String() != "abc" {
		t.Errorf("flushed %q of %q, want %q", w.at, w.Body, want)
	}
	Last(context.Background()) // outside of Combine
}
