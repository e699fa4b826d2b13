// Package s3 runs an S3 server for tests, the Versity gateway over a directory. Objects are looked at as the files that the server
// keeps them in.
package s3

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// The key of the server's only account.
const (
	AccessKeyID     = "AKIDBARCHANTEST"
	SecretAccessKey = "5uPer-secret-0f-tests"
)

// Server is a running S3 server.
type Server struct {
	program.Server
	// Address is its host and port.
	Address string
	dir     string
}

// Start starts a server with buckets. It ends with the test.
func Start(t testing.TB, buckets ...string) *Server {
	t.Helper()
	s := &Server{Address: program.Address(t), dir: t.TempDir()}
	for _, name := range append(buckets, "../meta") {
		if err := os.MkdirAll(filepath.Join(s.dir, "buckets", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s.Restart(t)
	t.Cleanup(func() { s.Stop(t) })
	return s
}

// Restart starts a server that was stopped.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	cmd := exec.Command(program.Find(t, "s3-server", "scripts/tool.sh s3-server"), s.Address, filepath.Join(s.dir, "buckets"), filepath.Join(s.dir, "meta")) //nolint:gosec,noctx // ended by Stop
	cmd.Env = append(os.Environ(), "ACCESS_KEY_ID="+AccessKeyID, "SECRET_ACCESS_KEY="+SecretAccessKey)
	client := &http.Client{Timeout: time.Second}
	s.Start(t, cmd, func() error {
		response, err := client.Get(s.URL()) //nolint:noctx // has a timeout
		if err != nil {
			return err
		}
		return response.Body.Close()
	})
}

// URL is the server's endpoint.
func (s *Server) URL() string { return "http://" + s.Address }

func (s *Server) path(bucket, key string) string { return filepath.Join(s.dir, "buckets", bucket, key) }

// Object returns an object, or nil if there is none.
func (s *Server) Object(t testing.TB, bucket, key string) []byte {
	t.Helper()
	text, err := os.ReadFile(s.path(bucket, key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	if text == nil {
		text = []byte{}
	}
	return text
}

// Put makes an object, as another client would.
func (s *Server) Put(t testing.TB, bucket, key, text string) {
	t.Helper()
	path := s.path(bucket, key)
	err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600))
	if err != nil {
		t.Fatal(fmt.Errorf("put %s: %w", key, err))
	}
}
