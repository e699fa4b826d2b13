package e2e

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/barchan-dev/barchan/internal/base/portable"
)

// lockedRegistry is behind TLS, by a CA that only its file has, and requires a user.
type lockedRegistry struct {
	host, ca, docker string
	// fault, unless it is nil, answers what it returns true for.
	fault atomic.Pointer[func(http.ResponseWriter, *http.Request) bool]
}

func newLockedRegistry(t *testing.T) *lockedRegistry {
	t.Helper()
	l := &lockedRegistry{}
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	store := registry.New(registry.Logger(quiet), registry.WithBlobHandler(registry.NewDiskBlobHandler(t.TempDir())))
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != registryUser || password != registryPassword {
			w.Header().Set("WWW-Authenticate", `Basic realm="all"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`, http.StatusUnauthorized)
			return
		}
		if f := l.fault.Load(); f == nil || !(*f)(w, r) {
			store.ServeHTTP(w, r)
		}
	}))
	srv.Config.ErrorLog = quiet
	srv.StartTLS()
	t.Cleanup(srv.Close)
	l.host = srv.Listener.Addr().String()
	l.ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(l.ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	l.docker = l.login(t, registryPassword)
	return l
}

// login makes a directory with Docker's configuration.
func (l *lockedRegistry) login(t *testing.T, password string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	text := fmt.Sprintf(`{"auths":{%q:{"username":%q,"password":%q}}}`, l.host, registryUser, password)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// as is the server for a user with these variables.
func (s *server) as(variables ...string) *server {
	c := *s
	c.env = append(slices.Clone(s.env), variables...)
	return &c
}

// breaks ends the connection in the middle of the first large body of a method, and all that comes then.
func (l *lockedRegistry) breaks(method string) {
	var over atomic.Bool
	f := func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case over.Load():
		case r.Method == http.MethodPatch && method == r.Method && r.ContentLength > 1<<20:
			_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
		case r.Method == http.MethodGet && method == r.Method && strings.Contains(r.URL.Path, "/blobs/"):
			w.Header().Set("Content-Length", "99999999")
			_, _ = w.Write(bytes.Repeat([]byte("x"), 1<<20))
		default:
			return false
		}
		over.Store(true)
		panic(http.ErrAbortHandler)
	}
	l.fault.Store(&f)
}

// hangs keeps the first large body of a method, once some of it has passed, until it is released.
func (l *lockedRegistry) hangs(method string) (begun <-chan struct{}, release func()) {
	reached, released := make(chan struct{}), make(chan struct{})
	var once atomic.Bool
	f := func(w http.ResponseWriter, r *http.Request) bool {
		large := r.ContentLength > 1<<20 || (r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/"))
		if r.Method != method || !large || !once.CompareAndSwap(false, true) {
			return false
		}
		if r.Method == http.MethodGet {
			w.Header().Set("Content-Length", "99999999")
			_, _ = w.Write(bytes.Repeat([]byte("x"), 100))
			_ = http.NewResponseController(w).Flush()
		} else {
			_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
		}
		close(reached)
		<-released
		panic(http.ErrAbortHandler)
	}
	l.fault.Store(&f)
	return reached, func() { l.fault.Store(nil); close(released) }
}

// testRegistries pushes and pulls by a registry as users have them, and has all go wrong with it.
func testRegistries(t *testing.T, home, away *server, name string) {
	l := newLockedRegistry(t)
	place := portable.Scheme + l.host + "/team/tale:1"
	login, ca := "DOCKER_CONFIG="+l.docker, "SSL_CERT_FILE="+l.ca
	denied := "DOCKER_CONFIG=" + l.login(t, "another")

	for what, c := range map[string]struct {
		variables []string
		flags     []string
		text      string
	}{
		"a CA that is not known": {[]string{login}, nil, "is not trusted"},
		"a wrong password":       {[]string{denied, ca}, nil, "with the password that Docker's configuration has for " + l.host},
		"no password":            {[]string{"DOCKER_CONFIG=" + t.TempDir(), ca}, nil, "no password for " + l.host},
		"a CA file that is none": {[]string{login}, []string{"--ca-file", "/none"}, "/none"},
	} {
		out, err := home.as(c.variables...).try(append([]string{"checkpoint", "export", name, place}, c.flags...)...)
		if exitCode(err) != 1 || !strings.Contains(out, c.text) {
			t.Errorf("push with %s = %v, want %q\n%s", what, err, c.text, out)
		}
		s := away.as(c.variables...)
		s.refuses(what, func() (string, error) {
			return s.try(append([]string{"checkpoint", "import", place, "--name", "denied"}, c.flags...)...)
		}, c.text)
	}

	pusher, puller := home.as(login, ca), away.as(login)
	t.Run("gone in a push", func(t *testing.T) {
		l.breaks(http.MethodPatch)
		if out, err := pusher.in(t).try("checkpoint", "export", name, place); exitCode(err) != 1 || !strings.Contains(out, "push sha256:") {
			t.Errorf("push = %v\n%s", err, out)
		}
		l.fault.Store(nil)
		puller.in(t).refuses("half a push", func() (string, error) {
			return puller.try("checkpoint", "import", place, "--ca-file", l.ca)
		}, "MANIFEST_UNKNOWN", "NAME_UNKNOWN")
	})
	t.Run("left in a push", func(t *testing.T) {
		begun, release := l.hangs(http.MethodPatch)
		defer release()
		_, _ = pusher.in(t).interrupts(begun, "checkpoint", "export", name, place)
	})
	images := away.images()
	pusher.data("checkpoint", "export", name, place)
	t.Run("gone in a pull", func(t *testing.T) {
		s := puller.in(t)
		l.breaks(http.MethodGet)
		s.refuses("a registry that goes", func() (string, error) {
			return s.try("checkpoint", "import", place, "--ca-file", l.ca, "--name", "gone")
		}, "pull ")
		l.fault.Store(nil)
	})
	t.Run("left in a pull", func(t *testing.T) {
		s := puller.in(t)
		begun, release := l.hangs(http.MethodGet)
		defer release()
		s.refuses("Ctrl-C", func() (string, error) {
			return s.interrupts(begun, "checkpoint", "import", place, "--ca-file", l.ca, "--name", "left")
		}, "")
	})
	if now := away.images(); !slices.Equal(now, images) {
		t.Errorf("images were %v, and are %v", images, now)
	}
	if out := puller.data("checkpoint", "import", place, "--ca-file", l.ca, "--name", "pulled"); strings.TrimSpace(out) != "pulled" {
		t.Errorf("import returned %q", out)
	}
	away.dropCheckpoints("pulled")
	home.untilInOrder()
	away.untilInOrder()
}

// interrupts ends a command by SIGINT once something has begun.
func (s *server) interrupts(begun <-chan struct{}, args ...string) (string, error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, args...)
	var stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = s.env, &stderr, &stderr
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var err error
	select {
	case <-begun:
		_ = cmd.Process.Signal(os.Interrupt) // if it had ended, the exit code shows it
		err = <-ended
	case err = <-ended: // without coming to that
	}
	if exitCode(err) != interrupted {
		s.t.Errorf("barchan %s, interrupted = %v\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return stderr.String(), err
}
