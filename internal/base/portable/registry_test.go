package portable

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	served "github.com/google/go-containerregistry/pkg/registry"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// locked is a registry behind TLS that requires a password.
type locked struct {
	host, ca string
	// fault, unless it is nil, answers a request in the registry's place where it returns true.
	fault atomic.Pointer[func(http.ResponseWriter, *http.Request) bool]
}

func newLocked(t *testing.T) *locked {
	t.Helper()
	l := &locked{}
	store := served.New(served.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)))
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "user" || password != "right" {
			w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}`, http.StatusUnauthorized)
			return
		}
		if f := l.fault.Load(); f != nil && (*f)(w, r) {
			return
		}
		store.ServeHTTP(w, r)
	}))
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)
	l.host = srv.Listener.Addr().String()
	l.ca = filepath.Join(t.TempDir(), "ca.pem")
	must(t, os.WriteFile(l.ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600))
	return l
}

// login writes what `docker login` does; an empty password writes nothing.
func (l *locked) login(t *testing.T, password string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	if password != "" {
		text := fmt.Sprintf(`{"auths":{%q:{"username":"user","password":%q}}}`, l.host, password)
		must(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600))
	}
}

func (l *locked) place(t *testing.T, a Access) Place {
	t.Helper()
	p, err := ParsePlace(Scheme+l.host+"/team/x:1", a)
	must(t, err)
	return p
}

func (l *locked) trusted(t *testing.T) Place {
	t.Helper()
	return l.place(t, Access{CAFile: l.ca})
}

// pushTar and pullTar are what an export and an import do.
func pushTar(t *testing.T, tar []byte, to Place) error {
	t.Helper()
	if err := to.CheckPush(t.Context()); err != nil {
		return err
	}
	in, err := Read(bytes.NewReader(tar))
	must(t, err)
	return Push(t.Context(), in, to)
}

func pullTar(t *testing.T, from Place) ([]byte, error) {
	t.Helper()
	l, err := Pull(t.Context(), from)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = l.Write(t.Context(), &b)
	return b.Bytes(), err
}

func wantRefusal(t *testing.T, what string, err, kind error, texts ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: %v, want %v", what, err, kind)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %q does not contain %q", what, err, text)
		}
	}
}

func TestRegistryWithTLSAndPassword(t *testing.T) {
	l := newLocked(t)
	l.login(t, "right")
	whole := tarOf(t, sample(t, true))
	must(t, pushTar(t, whole, l.trusted(t)))
	got, err := pullTar(t, l.trusted(t))
	must(t, err)
	if !bytes.Equal(got, whole) {
		t.Error("what was pulled is another tar")
	}

	untrusting := l.place(t, Access{})
	_, err = pullTar(t, untrusting)
	wantRefusal(t, "pull by a CA that is not known", err, errs.ErrForbidden, "is not trusted", "unknown authority", "--ca-file", l.host)
	wantRefusal(t, "push by an unknown CA", pushTar(t, whole, untrusting), errs.ErrForbidden, "is not trusted", "--ca-file")

	for password, text := range map[string]string{"": "no password for " + l.host, "wrong": "with the password that Docker's configuration has for " + l.host} {
		l.login(t, password)
		_, err = pullTar(t, l.trusted(t))
		wantRefusal(t, "pull with password "+password, err, errs.ErrForbidden, "401", text)
		wantRefusal(t, "push with password "+password, pushTar(t, whole, l.trusted(t)), errs.ErrForbidden, "401", text)
	}
}

func TestFilesOfCAs(t *testing.T) {
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	must(t, os.WriteFile(empty, []byte("no certificate"), 0o600))
	for file, text := range map[string]string{filepath.Join(dir, "none"): "no such file", empty: "no certificate in PEM"} {
		_, err := ParsePlace("oci://reg.test/x", Access{CAFile: file})
		wantRefusal(t, file, err, errs.ErrInvalid, text)
	}
}

// breaks has requests of a kind end by a fault, from the nth on.
func (l *locked) breaks(method, part string, n int32, do func(http.ResponseWriter, *http.Request)) {
	var seen atomic.Int32
	f := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != method || !strings.Contains(r.URL.Path, part) || seen.Add(1) < n {
			return false
		}
		do(w, r)
		return true
	}
	l.fault.Store(&f)
}

func (l *locked) repair() { l.fault.Store(nil) }

// gone ends the connection in the middle of a body.
func gone(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		w.Header().Set("Content-Length", "5000")
		_, _ = w.Write(bytes.Repeat([]byte("p"), 2000))
		_ = http.NewResponseController(w).Flush()
	} else {
		_, _ = io.ReadFull(r.Body, make([]byte, 3))
	}
	panic(http.ErrAbortHandler)
}

// A registry that disconnects or stalls in the middle is an error with that reason, and nothing has
// the name then.
func TestRegistryThatGoes(t *testing.T) {
	l := newLocked(t)
	l.login(t, "right")
	whole := tarOf(t, sample(t, false))
	release := make(chan struct{})
	defer close(release)
	hang := func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}
	impatient := l.place(t, Access{CAFile: l.ca, Patience: 2 * time.Second})
	for _, c := range []struct {
		what   string
		to     Place
		method string
		nth    int32
		do     func(http.ResponseWriter, *http.Request)
		text   string
	}{
		{"the connection ends in the second blob", l.trusted(t), http.MethodPatch, 2, gone, "push sha256:"},
		{"nothing is answered to the second blob", impatient, http.MethodPatch, 2, hang, "moved no byte"},
		{"a server's fault", l.trusted(t), http.MethodPatch, 1, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }, "502"},
	} {
		l.breaks(c.method, "/blobs/uploads/", c.nth, c.do)
		wantRefusal(t, c.what, pushTar(t, whole, c.to), errs.ErrUnavailable, c.text)
		l.repair()
		if _, err := pullTar(t, l.trusted(t)); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s: there is something under the name: %v", c.what, err)
		}
	}
	must(t, pushTar(t, whole, l.trusted(t)))
	for _, c := range []struct {
		what string
		from Place
		nth  int32
		do   func(http.ResponseWriter, *http.Request)
		text string
	}{
		{"the connection ends in the large blob", l.trusted(t), 5, gone, "pull sha256:"},
		{"nothing is answered to the third blob", impatient, 3, hang, "moved no byte"},
	} {
		l.breaks(http.MethodGet, "/blobs/sha256:", c.nth, c.do)
		_, err := pullTar(t, c.from)
		wantRefusal(t, c.what, err, errs.ErrUnavailable, c.text)
		if strings.Contains(err.Error(), "the tar ends") {
			t.Errorf("%s: got a tar, want none: %v", c.what, err)
		}
		l.repair()
	}
	if got, err := pullTar(t, l.trusted(t)); err != nil || !bytes.Equal(got, whole) {
		t.Errorf("pulled again: %v", err)
	}
}

// Nothing is sent to a registry without TLS unless that is allowed, whatever the library tries.
func TestPlainHTTP(t *testing.T) {
	sent := false
	inner := roundTrip(func(*http.Request) (*http.Response, error) {
		sent = true
		return nil, errors.New("sent")
	})
	for address, plain := range map[string]bool{
		"10.1.2.3:5000": false, "192.168.1.1": false, "reg.test": false, "reg.local": false,
		"localhost:5000": true, "127.0.0.1:5000": true, "127.8.0.1": true, "[::1]:5000": true, "[::1]": true,
	} {
		for _, allowed := range []bool{false, true} {
			sent = false
			w := &wire{inner: inner, plain: allowed || isLoopback(address), patience: time.Hour}
			req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/v2/", http.NoBody)
			if _, err := w.RoundTrip(req); sent != (plain || allowed) || sent == errors.Is(err, errPlain) { //nolint:bodyclose // there is none
				t.Errorf("%s, allowed %v: sent %v, %v", address, allowed, sent, err)
			}
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (r roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return r(req) }

// The time in which we make what is sent, or leave what came unread, is not the registry's.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sleepy := readFunc(func(b []byte) (int, error) {
			time.Sleep(2 * time.Hour)
			return copy(b, "x"), io.EOF
		})
		inner := roundTrip(func(req *http.Request) (*http.Response, error) {
			if _, err := io.ReadAll(req.Body); err != nil {
				return nil, err
			}
			done := false
			return &http.Response{Body: io.NopCloser(readFunc(func(b []byte) (int, error) {
				if !done {
					done = true
					return copy(b, "y"), nil
				}
				<-req.Context().Done()
				return 0, req.Context().Err()
			}))}, nil
		})
		w := &wire{inner: inner, patience: time.Hour}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "https://reg.test/", sleepy)
		must(t, err)
		res, err := w.RoundTrip(req)
		must(t, err)
		defer func() { _ = res.Body.Close() }()
		time.Sleep(2 * time.Hour)
		if n, err := res.Body.Read(make([]byte, 1)); n != 1 || err != nil {
			t.Errorf("read of what is there: %d, %v", n, err)
		}
		began := time.Now()
		_, err = res.Body.Read(make([]byte, 1))
		wantRefusal(t, "what does not come", err, errs.ErrUnavailable, "moved no byte for 1h")
		if took := time.Since(began); took != time.Hour {
			t.Errorf("waited for %s", took)
		}
	})
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(b []byte) (int, error) { return f(b) }
