package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// buildDisk is the disk of the sandboxes of steps; more is unpacked of one archive.
const (
	buildDisk = "1Gi"
	bombSize  = 1280 << 20
)

// zeros are so many bytes.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// packed is an upload with entries, and the file "a" after them.
func packed(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	z, err := gzip.NewWriterLevel(&buf, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	for _, h := range append(entries, tar.Header{Name: "a", Size: 1}) {
		h.Mode = 0o644
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(w, zeros{}, h.Size); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// archives has builds copy files of hostile archives. They meet the bounds of a step's sandbox; the log says what the matter is.
func (s *server) archives(t *testing.T) {
	for i, tt := range []struct {
		name    string
		archive []byte
		source  string
		log     string // empty: the build succeeds
	}{
		{"a path out of it", packed(t, tar.Header{Name: "../../../etc/passwd", Size: 1}), "a", "Member name contains '..'"},
		{"an absolute path", packed(t, tar.Header{Name: "/etc/passwd", Size: 1}), "a", ""},
		{"a path through a link", packed(t, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, tar.Header{Name: "l/passwd", Size: 1}), "a", "l/passwd: Cannot open"},
		{"a hard link out of it", packed(t, tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}), ".", "Cannot hard link"},
		{"no archive", []byte("neither tar nor gzip"), "a", "gzip: stdin: not in gzip format"},
		{"no such file", packed(t), "b", "the archive has no b"},
		{"more than fits", packed(t, tar.Header{Name: "big", Size: bombSize}), "big", "No space left on device"},
	} {
		reason, log := s.buildOf(t, fmt.Sprintf("%064x", i+1), tt.archive, tt.source)
		if (reason == "") != (tt.log == "") || !strings.Contains(log, tt.log) {
			t.Errorf("%s: the build failed by %q, want %q in the log:\n%s", tt.name, reason, tt.log, log)
		}
		if tt.log != "" {
			continue
		}
		if _, out := s.keep("unpacked", "sh", "-c", "head -c 4 /etc/passwd; stat -c ' %s' /srv/copied"); out != "root 1\n" {
			t.Errorf("%s: its template has %q", tt.name, out)
		}
	}
}

// buildOf builds a template by a copy of a source in an archive, and returns why that failed, and the log.
func (s *server) buildOf(t *testing.T, hash string, archive []byte, source string) (reason, log string) {
	t.Helper()
	key := s.localKey()
	call := func(method, path string, body, into any, want int) {
		t.Helper()
		status, text := s.call(key, method, path, body)
		if status != want {
			t.Fatalf("%s %s: %d %s", method, path, status, text)
		}
		if err := json.Unmarshal([]byte(text), into); into != nil && err != nil {
			t.Fatal(err)
		}
	}
	var b struct{ TemplateID, BuildID string }
	call(http.MethodPost, "/v3/templates", map[string]any{"name": "unpacked"}, &b, http.StatusAccepted)
	var to struct{ URL string }
	call(http.MethodGet, "/templates/"+b.TemplateID+"/files/"+hash, nil, &to, http.StatusCreated)
	put, err := http.NewRequestWithContext(t.Context(), http.MethodPut, to.URL, bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(put)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	call(http.MethodPost, "/v2/templates/"+b.TemplateID+"/builds/"+b.BuildID, map[string]any{
		"fromImage": baseImage, "steps": []any{map[string]any{"type": "COPY", "args": []string{source, "/srv/copied"}, "filesHash": hash}},
	}, nil, http.StatusAccepted)
	var status struct {
		Status     string
		Reason     struct{ Message string }
		LogEntries []struct{ Message string }
	}
	eventually.True(t, "the build ends", func() bool {
		call(http.MethodGet, "/templates/"+b.TemplateID+"/builds/"+b.BuildID+"/status", nil, &status, http.StatusOK)
		return status.Status == "ready" || status.Status == "error"
	})
	for _, e := range status.LogEntries {
		log += e.Message + "\n"
	}
	return status.Reason.Message, log
}
