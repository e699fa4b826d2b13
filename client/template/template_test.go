package template_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/client/template"
)

func TestUpload(t *testing.T) {
	status := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil || string(b) != "tar" || r.Method != http.MethodPut || r.Header.Get("X-Api-Key") != "" || r.Header.Get("X-A") != "b" || r.ContentLength != 3 {
			t.Errorf("%s of %q, %v, %v", r.Method, b, r.Header, err)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `{"message":"it is too large"}`)
	}))
	defer server.Close()
	c, err := client.New(client.Config{URL: server.URL, Key: "k", HTTP: server.Client()})
	if err != nil {
		t.Fatal(err)
	}
	to := template.Files{URL: server.URL + "/x", Headers: map[string]string{"X-A": "b", "content-length": "7"}}
	if err := template.Upload(t.Context(), c, to, strings.NewReader("tar"), 3); err != nil {
		t.Error(err)
	}
	status = http.StatusRequestEntityTooLarge
	if err := template.Upload(t.Context(), c, to, strings.NewReader("tar"), 3); !errors.Is(err, client.ErrTooLarge) || err.Error() != "upload files: it is too large" {
		t.Error(err)
	}
	server.Close()
	if err := template.Upload(t.Context(), c, to, strings.NewReader("tar"), 3); !errors.Is(err, client.ErrUnavailable) {
		t.Error(err)
	}
}
