package cli

import (
	"bytes"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// imageRegistry has one image, which is called team/app:1.
type imageRegistry struct {
	*httptest.Server
	host, layer string      // the digest of the image's one
	cut         atomic.Bool // it ends the connection at the request for the layer
}

func newImageRegistry(t *testing.T, start func(*httptest.Server)) *imageRegistry {
	t.Helper()
	r := &imageRegistry{}
	store := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)))
	r.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if r.cut.Load() && req.Method == http.MethodGet && strings.HasSuffix(req.URL.Path, r.layer) {
			panic(http.ErrAbortHandler)
		}
		store.ServeHTTP(w, req)
	}))
	r.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	start(r.Server)
	t.Cleanup(r.Close)
	r.host = r.Listener.Addr().String()
	img, err := random.Image(1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(r.host + "/team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithTransport(r.Client().Transport)); err != nil {
		t.Fatal(err)
	}
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	r.layer = m.Layers[0].Digest.Hex
	return r
}

func (s *server) wantImported(t *testing.T, layer string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bytes.Contains(s.tar, []byte("oci-layout")) || !bytes.Contains(s.tar, []byte("blobs/sha256/"+layer)) {
		t.Errorf("what the server got, %d bytes, is not the image", len(s.tar))
	}
}

// An image behind a certificate of one's own authority comes by this program, as a checkpoint does.
func TestImagePullByCAFile(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	s := newServer(t, nil)
	r := newImageRegistry(t, (*httptest.Server).StartTLS)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	ref := r.host + "/team/app:1"
	s.run("", "image", "pull", ref, "--ca-file", ca).want(t, 0, ref+"\n", "pull 100% of ")
	s.wantImported(t, r.layer)
	s.run("", "image", "pull", ref, "--ca-file", ca, "--json").want(t, 0, `"ref": "`+ref+`"`, "")
	s.run("any\n", "image", "pull", ref, "--ca-file", ca, "--username", "u", "--password-stdin").want(t, 0, ref+"\n", "")
	s.run("", "image", "pull", r.host+"/team/none:1", "--ca-file", ca).want(t, 1, "", "barchan: pull "+r.host+"/team/none:1: ")
	s.run("", "image", "pull", ref, "--ca-file", ca+".none").want(t, 1, "", "read the registry's CA: ")
	s.run("", "image", "pull", ref, "--plain-http").want(t, 1, "", "its certificate is not trusted")
	s.run("", "image", "pull", "Not A Ref", "--ca-file", ca).want(t, 1, "", `image reference "Not A Ref"`)
}

func TestImagePullWithoutTLS(t *testing.T) {
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	s := newServer(t, nil)
	r := newImageRegistry(t, (*httptest.Server).Start)
	ref := r.host + "/team/app:1"
	s.run("", "image", "pull", ref, "--plain-http").want(t, 0, ref+"\n", "")
	s.wantImported(t, r.layer)

	// The cause is the lost connection, not the receiver.
	r.cut.Store(true)
	s.run("", "image", "pull", ref, "--plain-http").want(t, 1, "", "pull from "+ref+": ")
}
