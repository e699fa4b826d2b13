package nodesocket_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/daemon/nodesocket"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// serve runs a node's end until stop is called, or the test ends.
func serve(t *testing.T, cfg nodesocket.Config) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- nodesocket.Serve(ctx, cfg) }()
	var stopped atomic.Bool
	stop = func() {
		if cancel(); stopped.CompareAndSwap(false, true) {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(stop)
	return stop
}

func newGate(t *testing.T) *health.Gate {
	t.Helper()
	g, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestConditions has a server refuse new work for what its node lacks, or while it is away.
func TestConditions(t *testing.T) {
	t.Parallel()
	node, server := newGate(t), newGate(t)
	cfg := nodesocket.Config{
		Socket: filepath.Join(t.TempDir(), "below", "node.sock"), Log: telemetry.Discard(),
		State: func() nodesocket.State {
			return nodesocket.State{Version: "v1", DataDir: "/data", Conditions: node.Conditions()}
		},
	}
	client := nodesocket.NewClient(cfg.Socket)
	watching, cancel := context.WithCancel(t.Context())
	watched := make(chan error, 1)
	go func() { watched <- client.Watch(watching, server) }()
	defer func() {
		cancel()
		if err := <-watched; err != nil {
			t.Error(err)
		}
	}()
	refused := func(want string) {
		t.Helper()
		eventually.True(t, "new work is refused: "+want, func() bool {
			text, _ := errs.PublicMessage(server.Err())
			return strings.Contains(text, want)
		})
	}
	open := func() {
		t.Helper()
		eventually.True(t, "new work is taken", func() bool { return server.Err() == nil })
	}
	refused("(node: its process does not answer)")
	stop := serve(t, cfg)
	open()
	node.Set("disk", errs.Public(errors.New("statfs"), "12 MiB are free"))
	refused("(node: disk: 12 MiB are free)")
	node.Set("disk", nil)
	open()
	state, err := client.State(t.Context())
	if err != nil || state.Version != "v1" || state.DataDir != "/data" {
		t.Errorf("State = %+v, %v", state, err)
	}
	stop()
	refused("(node: its process does not answer)")
	serve(t, cfg)
	open()
}

func TestDiskUsed(t *testing.T) {
	t.Parallel()
	known := sandbox.Ref{Namespace: "ns", Name: "a&b", UID: "u"}
	cfg := nodesocket.Config{Socket: filepath.Join(t.TempDir(), "node.sock"), Log: telemetry.Discard(), DiskUsed: func(_ context.Context, ref sandbox.Ref) (int64, error) {
		switch ref {
		case known:
			return 42, nil
		case sandbox.Ref{Name: "slow"}:
			return 0, errs.Public(errs.ErrTimeout, "the disk is slow")
		}
		return 0, errs.ErrNotFound
	}}
	serve(t, cfg)
	client := nodesocket.NewClient(cfg.Socket)
	eventually.NoError(t, "the socket is open", func() error {
		got, err := client.DiskUsed(t.Context(), known)
		if err == nil && got != 42 {
			t.Errorf("DiskUsed = %d", got)
		}
		return err
	})
	if _, err := client.DiskUsed(t.Context(), sandbox.Ref{Name: "other"}); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("of an unknown sandbox: %v", err)
	}
	if _, err := client.DiskUsed(t.Context(), sandbox.Ref{Name: "slow"}); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "the disk is slow") {
		t.Errorf("of a slow disk: %v", err)
	}
}

// TestGroup checks who may open the socket.
func TestGroup(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: the group of a file is changed by root")
	}
	for group, want := range map[string]struct {
		mode os.FileMode
		gid  uint32
	}{"": {0o600, 0}, "12345": {0o660, 12345}, "daemon": {0o660, 1}} {
		socket := filepath.Join(t.TempDir(), "node.sock")
		serve(t, nodesocket.Config{Socket: socket, Group: group, Log: telemetry.Discard()})
		eventually.NoError(t, "the socket of group "+group, func() error {
			info, err := os.Stat(socket)
			if err != nil {
				return err
			}
			if stat, _ := info.Sys().(*syscall.Stat_t); info.Mode().Perm() != want.mode || stat.Gid != want.gid {
				t.Errorf("group %q: mode %v, group %d", group, info.Mode(), stat.Gid)
			}
			return nil
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := nodesocket.Serve(ctx, nodesocket.Config{Socket: filepath.Join(t.TempDir(), "s"), Group: "no-such-group", Log: telemetry.Discard()})
	if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "nodeSocketGroup") {
		t.Errorf("an unknown group: %v", err)
	}
}

// TestContent passes a request on as it is, and tells of a node that is away.
func TestContent(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "node.sock")
	content := nodesocket.NewClient(socket).Content(telemetry.Discard())
	ask := func() *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPut, nodesocket.ContentPath+"v1/file?path=%2Fa%20b", strings.NewReader("text"))
		r.Header.Set("Authorization", "Bearer token")
		w := httptest.NewRecorder()
		content.ServeHTTP(w, r)
		return w
	}
	if w := ask(); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "the node does not answer") {
		t.Errorf("without a node: %d %s", w.Code, w.Body)
	}
	serve(t, nodesocket.Config{Socket: socket, Log: telemetry.Discard(), State: func() nodesocket.State { return nodesocket.State{} }, Content: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprint(w, r.Method, " ", r.URL, " ", r.Header.Get("Authorization"), " ", r.ContentLength, " ", string(body))
	})})
	if err := nodesocket.NewClient(socket).Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w, want := ask(), "PUT /volumecontent/v1/file?path=%2Fa%20b Bearer token 4 text"; w.Code != http.StatusTeapot || w.Body.String() != want {
		t.Errorf("answer %d %s, want %s", w.Code, w.Body, want)
	}
}
