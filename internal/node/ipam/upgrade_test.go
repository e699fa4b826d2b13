package ipam_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/base/migrate"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

const (
	upgradeDirEnv = "BARCHAN_TEST_UPGRADE_DIR"
	upgradeDieEnv = "BARCHAN_TEST_UPGRADE_DIE"
	upgradeRows   = 1000
	upgradeStep   = "2026-11-leases-by-subnet"
)

func upgradeSubnet() netip.Prefix { return netip.MustParsePrefix("10.0.0.0/16") }

// upgrade migrates a directory as the server does; die kills the process before the step is
// recorded.
func upgrade(ctx context.Context, dir string, die bool) (*migrate.Migrations, error) {
	m, err := migrate.Open(migrate.Config{File: filepath.Join(dir, "migrations.json"), Log: telemetry.Discard(), Steps: []migrate.Step{{
		ID: upgradeStep, Stage: migrate.Storage, Do: func(ctx context.Context) error {
			fmt.Fprintln(os.Stdout, "migrating")
			err := ipam.MigrateFile(ctx, filepath.Join(dir, "node.db"), upgradeSubnet(), slog.New(slog.DiscardHandler))
			if err == nil && die {
				err = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				<-ctx.Done() // the killer needs a moment
			}
			return err
		},
	}}})
	if err != nil {
		return nil, err
	}
	return m, m.Run(ctx, migrate.Storage)
}

// TestUpgradeChild is the process that TestUpgradeKilled kills.
func TestUpgradeChild(t *testing.T) {
	dir := os.Getenv(upgradeDirEnv)
	if dir == "" {
		t.Skip("runs in TestUpgradeKilled")
	}
	if _, err := upgrade(t.Context(), dir, os.Getenv(upgradeDieEnv) != ""); err != nil {
		t.Fatal(err)
	}
}

// TestUpgradeKilled kills the lease migration, or its process before the step is recorded; the next
// start must complete it.
func TestUpgradeKilled(t *testing.T) {
	for round := range 8 {
		dir := t.TempDir()
		makeFlat(t, filepath.Join(dir, "node.db"))
		killUpgrade(t, dir, round%4 == 0)
		m, err := upgrade(t.Context(), dir, false)
		if err != nil {
			t.Fatal(err)
		}
		if e := m.Entries(); len(e) != 1 || e[0].Result != migrate.Done {
			t.Errorf("round %d: ledger %+v", round, e)
		}
		checkMigrated(t, filepath.Join(dir, "node.db"))
	}
}

func killUpgrade(t *testing.T, dir string, late bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestUpgradeChild$")
	cmd.Env = append(os.Environ(), upgradeDirEnv+"="+dir)
	if late {
		cmd.Env = append(cmd.Env, upgradeDieEnv+"=1")
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil || !strings.Contains(line, "migrating") {
		t.Errorf("the child printed %q, %v", line, err)
	}
	if !late { // at a random instant
		timer := time.AfterFunc(time.Duration(rand.IntN(20))*time.Millisecond, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	_, _ = io.Copy(io.Discard, lines)
	if err := cmd.Wait(); late && (err == nil || !strings.Contains(err.Error(), "killed")) {
		t.Errorf("child exited before the kill: %v", err)
	}
}

func upgradeAddr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, byte((i + 2) >> 8), byte(i + 2)})
}

// makeFlat writes leases in the format without subnets.
func makeFlat(t *testing.T, path string) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		flat, err := tx.CreateBucket([]byte("leases"))
		if err != nil {
			return err
		}
		for i := range upgradeRows {
			addr := upgradeAddr(i).String()
			row := fmt.Sprintf(`{"address":%q,"owner":"owner %d","state":"held","since":"2026-11-21T16:31:29.98Z"}`, addr, i)
			if err := flat.Put([]byte(addr), []byte(row)); err != nil {
				return err
			}
		}
		return flat.Put([]byte("10.0.255.9"), []byte("{not json"))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

func checkMigrated(t *testing.T, path string) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	store, err := ipam.NewBoltStore(db)
	if err != nil {
		t.Fatal(err)
	}
	b, err := ipam.Open(ipam.Config{Subnet: upgradeSubnet(), Store: store, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for i := range upgradeRows {
		if l, ok := b.Of(fmt.Sprint("owner ", i)); !ok || l.Address != upgradeAddr(i) || l.State != ipam.Held {
			t.Fatalf("lease %d became %+v, %v", i, l, ok)
		}
	}
	if unread := b.Unread(); len(b.List()) != upgradeRows || len(unread) != 1 || string(unread[0].Value) != "{not json" {
		t.Errorf("%d leases, unread %q", len(b.List()), unread)
	}
}
