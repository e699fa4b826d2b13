package e2e

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt" //nolint:depguard // it writes what a server of before wrote

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// bootPoints are the points that TestBootOverOlderData stops at.
const (
	pointMigrate = "migrate/leases"
	pointMoved   = "migrate/moved"
)

// identity distinguishes a sandbox that kept running from a replacement.
type identity struct {
	name, address string
	started       int64 // nanoseconds
	phase         sandbox.Phase
}

func (w *fixture) identities() map[string]identity {
	w.t.Helper()
	all := map[string]identity{}
	for _, x := range w.boxes() {
		one := identity{name: x.Name, address: strings.Join(x.Status.PodIPs, " "), phase: sandbox.PhaseOf(&x)}
		if b := x.Status.Barchan; b != nil && b.StartedAt != nil {
			one.started = b.StartedAt.UnixNano()
		}
		all[idOf(&x)] = one
	}
	return all
}

// TestBootOverOlderData boots over the data of a server from before there were migrations, with sandboxes that run
// and a full pool: those sandboxes, and no others, must be there afterwards. Until the migration is
// done nothing that decides is started; one that fails stops the boot.
//
// BARCHAN_OLD_BINARY may name a server of that time, which then makes the data. Without it, data of now are
// taken back to what they were.
func TestBootOverOlderData(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	bin := programWithPoints(t)
	old := os.Getenv("BARCHAN_OLD_BINARY")
	w := newFixtureOf(t, cmp.Or(old, bin))
	third := claimedSandbox(w)
	w.need(w.resize(t.Context(), 3))
	w.calm()
	before, wanted := w.bystanders(), w.identities()
	address := w.object(third.id).Status.PodIPs[0]
	w.stop(syscall.SIGKILL)
	if old == "" {
		w.backdate()
	}
	w.bin = bin

	w.arm(pointMigrate + "=error")
	w.begin()
	select {
	case err := <-w.done:
		w.cmd = nil
		if out := w.sinceArmed(); err == nil || !strings.Contains(out, `boot phase "migrate"`) || !strings.Contains(out, "leases-by-subnet") {
			t.Errorf("the server ended with %v\n%s", err, out)
		}
	case <-time.After(startTime):
		t.Fatalf("the boot continues after a failed migration\n%s", w.tail())
	}

	w.arm(pointMoved)
	w.begin()
	w.awaitKill(pointMoved)

	w.arm(pointMigrate + "=wait")
	w.begin()
	eventually.NoError(t, "the boot waits in the migration", func() error { return w.bootsAt("migrate") })
	if out := w.sinceArmed(); strings.Contains(out, "phase=caches") || strings.Contains(out, "phase=controllers") {
		t.Errorf("the boot continued\n%s", out)
	}
	if nonce, err := direct(address); err != nil || nonce != third.nonce {
		t.Errorf("meanwhile the sandbox at %s returned %s, %v; it was %s", address, nonce, err, third.nonce)
	}
	w.disarm()
	w.awaitReady()

	w.same(before)
	if nonce, _ := w.meet(third.id); nonce != third.nonce {
		t.Errorf("sandbox %s returned %s, it was %s", third.id, nonce, third.nonce)
	}
	w.calm()
	if got := w.identities(); !maps.Equal(got, wanted) {
		t.Errorf("sandboxes are\n%v\nwere\n%v", got, wanted)
	}
	w.resumeBystanders()
	killSubject(w, third)
	w.calm()
	w.clean()
}

// sinceArmed is the server's log since a point was armed.
func (w *fixture) sinceArmed() string {
	w.t.Helper()
	log, err := os.ReadFile(filepath.Join(w.dir, "log"))
	if err != nil {
		w.t.Fatal(err)
	}
	return string(log[w.since:])
}

// bootsAt waits until /readyz names a phase of the boot.
func (w *fixture) bootsAt(phase string) error {
	status, text := w.readiness()
	var got struct{ Phase string }
	if err := json.Unmarshal([]byte(text), &got); err != nil || status != http.StatusServiceUnavailable || got.Phase != phase {
		return fmt.Errorf("%d %s, want phase %s", status, text, phase)
	}
	return nil
}

// direct queries the witness of a sandbox without the gateway.
func direct(address string) (nonce string, err error) {
	client := http.Client{Timeout: eventually.Patience}
	resp, err := client.Get("http://" + net.JoinHostPort(address, strconv.Itoa(witnessPort)) + "/")
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var served int
	if _, err := fmt.Fscan(resp.Body, &nonce, &served); err != nil {
		return "", err
	}
	return nonce, nil
}

// backdate takes the data directory back to before there were migrations: leases in one bucket, without
// versions, and no ledger.
func (w *fixture) backdate() {
	w.t.Helper()
	data := w.value("BARCHAN_DATA_DIR")
	w.need(os.Remove(filepath.Join(data, "migrations.json")))
	db, err := bolt.Open(filepath.Join(data, "node", "node.db"), 0o600, &bolt.Options{Timeout: eventually.Patience})
	w.need(err)
	moved := 0
	err = db.Update(func(tx *bolt.Tx) error {
		flat, err := tx.CreateBucket([]byte("leases"))
		if err != nil {
			return err
		}
		subnets := tx.Bucket([]byte("subnets"))
		if subnets == nil {
			return errors.New("no leases by subnet")
		}
		err = subnets.ForEachBucket(func(name []byte) error {
			return subnets.Bucket(name).ForEach(func(key, value []byte) error {
				var row map[string]any
				if err := json.Unmarshal(value, &row); err != nil {
					return err
				}
				delete(row, "version")
				if value, err = json.Marshal(row); err != nil {
					return err
				}
				moved++
				return flat.Put(key, value)
			})
		})
		if err != nil {
			return err
		}
		return tx.DeleteBucket([]byte("subnets"))
	})
	w.need(errors.Join(err, db.Close()))
	if moved == 0 {
		w.t.Fatal("no lease was there to take back")
	}
}
