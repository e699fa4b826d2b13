package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// machineID is the file by which programs identify the machine, if the image has it.
const machineID = "/etc/machine-id"

// clockOff is the difference to the restorer's clock above which it is logged. The clock follows the
// host's, and a sandbox cannot set it.
const clockOff = 5 * time.Second

// requests are those in flight.
type requests struct {
	mu       sync.Mutex
	next     uint64                             // +checklocks:mu
	cancel   map[uint64]context.CancelCauseFunc // +checklocks:mu
	restored time.Time                          // +checklocks:mu
}

func newRequests() *requests { return &requests{cancel: map[uint64]context.CancelCauseFunc{}} }

// track lets restore end what a handler does.
func (q *requests) track(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == envd.PathRestored {
			next.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer q.add(cancel)()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

func (q *requests) add(cancel context.CancelCauseFunc) (remove func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	id := q.next
	q.next++
	q.cancel[id] = cancel
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		delete(q.cancel, id)
	}
}

// end ends all requests in flight, once for each restore.
func (q *requests) end(at *time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if at != nil {
		if !at.After(q.restored) {
			return
		}
		q.restored = *at
	}
	for _, cancel := range q.cancel {
		cancel(reply.ErrRestored)
	}
}

// postRestored applies the current configuration after a restore from a checkpoint, possibly with
// another identity. It needs no token: its only input is a file that only the node can write. A
// program inside that calls it ends requests to its own sandbox, which killing the agent does too.
func (a *Agent) postRestored(w http.ResponseWriter, r *http.Request) error {
	var req envd.RestoredRequest
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	if a.file == "" {
		return reply.Refuse(http.StatusNotFound, "this agent has no configuration file to read again")
	}
	cfg, err := envd.RereadConfig(a.file)
	if err != nil {
		return err
	}
	another := a.settings.Restore(cfg)
	a.requests.end(req.Timestamp)
	files := maps.Clone(cfg.SystemFiles)
	if _, given := files[machineID]; !given && another && a.etc.has(machineID) {
		if files == nil {
			files = map[string]string{}
		}
		files[machineID] = newMachineID()
	}
	left, err := a.etc.write(files)
	if err != nil {
		return err
	}
	if left != nil {
		a.log.InfoContext(r.Context(), "system files unchanged on read-only root", "error", left)
	}
	if err := setHostname(cfg.Hostname); err != nil {
		a.log.WarnContext(r.Context(), "hostname not set", "hostname", cfg.Hostname, "error", err)
	}
	if req.Timestamp != nil {
		if off := time.Since(*req.Timestamp).Abs(); off > clockOff {
			a.log.WarnContext(r.Context(), "clock differs from the host's", "by", off)
		}
	}
	a.log.InfoContext(r.Context(), "restored from a checkpoint", "sandbox", cfg.SandboxID, "another", another)
	return reply.NoContent(w, r)
}

// setHostname sets a given hostname if it differs: few agents have the privilege.
func setHostname(name string) error {
	if have, err := os.Hostname(); name == "" || (err == nil && have == name) {
		return nil
	}
	return unix.Sethostname([]byte(name))
}

func newMachineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:]) + "\n"
}

// etc writes system files.
type etc struct {
	root string

	mu sync.Mutex // +checklocksignore, serializes write
}

// has reports whether a regular file exists and is not empty.
func (e *etc) has(path string) bool {
	st, err := os.Stat(filepath.Join(e.root, path))
	return err == nil && st.Mode().IsRegular() && st.Size() > 0
}

// write replaces files atomically, unchanged ones too: the sandbox kernel's page cache may differ from
// what the node wrote since. A link is replaced, not followed. left has the errors of a read-only
// root.
func (e *etc) write(files map[string]string) (left, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(files)) {
		failed := e.writeOne(filepath.Join(e.root, path), files[path])
		switch {
		case failed == nil:
		case errors.Is(failed, unix.EROFS):
			left = errors.Join(left, fmt.Errorf("write %s: %w", path, failed))
		default:
			err = errors.Join(err, fmt.Errorf("write %s: %w", path, failed))
		}
	}
	return left, err
}

func (e *etc) writeOne(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(path), ".barchan-"+strings.ToLower(rand.Text()))
	err := os.WriteFile(tmp, []byte(text), 0o644)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(tmp)))
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
