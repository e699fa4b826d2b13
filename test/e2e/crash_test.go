package e2e

import (
	"context"
	"errors"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// seed chooses what a test does at random; zero means another one each time.
var seed = flag.Uint64("seed", 0, "repeat what a test did with this seed")

// dice are repeatable: the test logs the seed.
func dice(t *testing.T) *rand.Rand {
	t.Helper()
	n := *seed
	if n == 0 {
		n = uint64(time.Now().UnixNano()) % 1e6
	}
	t.Logf("to repeat it: go test ./test/e2e -run '^%s$' -seed=%d", t.Name(), n)
	return rand.New(rand.NewPCG(n, n))
}

// crash is one kill of the server: the operation, and the point at which the server is killed.
type crash struct {
	op operation
	// at is a point, and :N for the Nth time that it is reached.
	at string
	// then is the point at which the next server is killed while it recovers; empty: none.
	then string
}

func (c crash) name() string {
	return strings.ReplaceAll(strings.TrimSuffix(c.op.name+" at "+c.at+" then "+c.then, " then "), "/", "-")
}

// matrix is every crash that is tried. Each name of package failpoint must be in it.
func matrix() (all []crash) {
	for _, row := range []struct {
		op   operation
		at   string
		then string
	}{
		{op: cold, at: `create/written sandbox/seen sandbox/driven sandbox/status
			row/making node/address node/network node/snapshot disk/made node/mount node/bundle node/record node/start node/agent node/limit node/hold row/live
			sandbox/driven:2 sandbox/status:2 create/timed create/routed`},
		{op: prepared, at: "node/init_started node/init node/sidecar_files node/start node/sidecars"},
		{op: prepared, at: "node/sidecars", then: "undo/start undo/sidecar_files"},
		{op: prepared, at: "node/init_started", then: "undo/start undo/init"},
		{op: warm, at: "claim/held claim/written claim/bound create/routed node/bind_config node/bind_agent pool/made row/making"},
		{op: claimObject, at: "claim/held claim/written claimobject/status"},
		{op: coldClaimObject, at: "claimobject/made row/making row/live claimobject/status"},
		{op: endClaimObject, at: "claimobject/status claimobject/unmade row/removing row/gone sandbox/released"},
		{op: freeze, at: "pause/written row/pausing node/frozen row/paused sandbox/driven sandbox/status"},
		{op: store, at: "node/checkpoint node/flush row/storing node/keep node/stop node/unmount node/detach row/stored node/stored"},
		{op: thaw, at: "connect/written row/resuming node/thawed row/live sandbox/driven sandbox/status"},
		{op: wake, at: `connect/written row/waking node/network node/mount node/projected node/restore node/agent node/limit row/live node/running node/forgotten
			sandbox/driven sandbox/status`},
		{op: restart, at: "row/restarting node/network node/start node/agent node/limit row/live"},
		{op: finish, at: "row/ended sandbox/driven sandbox/status"},
		{op: kill, at: `delete/written row/removing undo/start undo/record undo/mount undo/bundle undo/snapshot undo/network undo/address
			row/gone sandbox/removed sandbox/released`},
		{op: killStored, at: "delete/written row/removing undo/bundle undo/address row/gone"},
		{op: shrink, at: "pool/unmade row/removing sandbox/released"},
		{op: takeSnapshot, at: `snapshot/written checkpointobject/intended checkpoint/writing row/capturing node/capture_row node/capture_ahead
			node/capture_held node/capture_copied node/capture_memory node/capture_files checkpoint/ready node/capture_ready
			checkpointobject/captured checkpointobject/finished`},
		{op: takeSnapshotAsleep, at: "checkpoint/writing node/capture_row node/capture_memory node/capture_files checkpoint/ready"},
		{op: takeAndSuspend, at: "checkpointobject/suspended checkpoint/writing checkpoint/ready"},
		{op: dropSnapshot, at: `snapshot/deleted checkpoint/dropping checkpoint/removed checkpoint/gone
			checkpointobject/dropped checkpointobject/released`},
		{op: startFromSnapshot, at: "row/making node/snapshot node/verify node/start node/agent row/live create/routed"},
		{op: forkSandbox, at: "checkpoint/writing checkpoint/ready fork/captured row/making node/verify row/live fork/started"},
		{op: snapshotOfSeveral, at: "checkpoint/writing node/capture_ahead node/capture_held node/capture_copied node/capture_files checkpoint/ready"},
		{op: snapshotOfSeveral, at: "node/capture_files", then: "checkpoint/removed checkpoint/gone"},
		{op: dropSnapshotOfSeveral, at: "checkpoint/dropping checkpoint/removed checkpoint/gone"},
		{op: forkSeveral, at: "checkpoint/ready row/making node/sidecar_files row/live"},
		{op: startSeveralFromSnapshot, at: "node/sidecar_files node/start node/agent row/live"},
		{op: startSeveralFromSnapshot, at: "node/start", then: "undo/start undo/sidecar_files undo/snapshot"},
		{op: warmUp, at: "node/warmup warmup/seeded warmup/checkpointed warmup/unseeded"},
		{op: buildTemplate, at: `templatebuild/status templatebuild/status:2 templatebuild/sandbox templatebuild/sandbox:3 templatebuild/packed templatebuild/packed:2 templatebuild/checkpoint
			templatebuild/checkpoint:3 checkpointobject/intended node/capture_copied checkpointobject/captured templatebuild/template`},
		{op: buildPrivate, at: "templatebuild/credentials images/pulled images/grant"},
		{op: removeImage, at: "images/removed"},
		{op: buildTemplate, at: "templatebuild/sandbox", then: "templatebuild/checkpoint"},
		{op: assignTags, at: "tag/used tag/assigned tag/assigned:2"},
		{op: removeTags, at: "tag/removed"},
		{op: makeVolume, at: "volume/made volumeobject/status volume/uploaded"},
		{op: makeBucket, at: "volume/written volume/key volume/made volume/mounted volume/served volumeobject/status"},
		{op: dropBucket, at: "volume/detached volume/unlinked volumeobject/released"},
		{op: notify, at: "webhook/written event/recorded webhook/delivered"},
		{op: rotateKey, at: "secrets/key_added secrets/rewritten secrets/key_removed"},
		{op: mountVolume, at: "row/making node/bundle row/live"},
		{op: dropVolume, at: "volume/unlinked volume/removed volumeobject/released"},
		{op: takeSnapshot, at: "node/capture_held", then: "checkpoint/removed checkpoint/gone checkpointobject/finished"},
		{op: takeSnapshot, at: "checkpoint/ready", then: "checkpointobject/finished"},
		{op: cold, at: "node/start node/agent", then: "undo/start undo/network undo/address row/gone"},
		{op: store, at: "row/storing", then: "node/stop node/detach row/stored"},
		{op: wake, at: "node/restore", then: "node/stop row/stored"},
		{op: kill, at: "undo/start", then: "undo/snapshot row/gone"},
	} {
		for at := range strings.FieldsSeq(row.at) {
			if row.then == "" {
				all = append(all, crash{op: row.op, at: at})
			}
			for then := range strings.FieldsSeq(row.then) {
				all = append(all, crash{op: row.op, at: at, then: then})
			}
		}
	}
	return slices.Concat(all, modes(), imports())
}

// TestMatrixIsWhole needs no server: each point is in the matrix, so that a new step without a test
// is seen.
func TestMatrixIsWhole(t *testing.T) {
	missing := map[string]bool{}
	for _, name := range failpoint.Names() {
		missing[name] = true
	}
	boot := crash{at: pointMigrate, then: pointMoved}          // of TestBootOverOlderData
	divided := crash{at: pointPartOwned, then: pointPartMoved} // of TestPrivilegesApart
	for _, c := range append(matrix(), boot, divided) {
		for _, at := range []string{c.at, c.then} {
			name, _, _ := strings.Cut(at, ":")
			if name != "" && !slices.Contains(failpoint.Names(), name) {
				t.Errorf("%s: there is no point %s", c.name(), name)
			}
			delete(missing, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		t.Errorf("no server was killed at point %s", name)
	}
}

// crashSample is how many crashes of the matrix are tried.
var crashSample = flag.Int("crash-sample", 0, "how many crashes of the matrix to try; 0 tries all, or a few with -short or TEST_PART=fast")

const (
	sampleInShort = 12
	sampleInFast  = 24
	// crashFixtures is how many servers share the matrix. Most of a crash is waiting.
	crashFixtures = 3
)

// sampleSize is how many of n crashes are tried.
func sampleSize(n int) int {
	switch {
	case *crashSample > 0:
		return min(*crashSample, n)
	case testing.Short():
		return min(sampleInShort, n)
	case os.Getenv(partVariable) == partFast:
		return min(sampleInFast, n)
	}
	return n
}

// sampleOf returns n crashes. Consecutive seeds return consecutive parts of one random order, so that
// len(all)/n of them, rounded up, cover all crashes.
func sampleOf(all []crash, n int, seed uint64) []crash {
	all = slices.Clone(all)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	size := uint64(len(all))
	rounds := (size + uint64(n) - 1) / uint64(n)
	first := seed % rounds * uint64(n)
	var some []crash
	for i := range uint64(n) {
		some = append(some, all[(first+i)%size])
	}
	return some
}

// TestSampleCoversMatrix: every crash is in the samples of as many consecutive days as a round takes.
func TestSampleCoversMatrix(t *testing.T) {
	all := matrix()
	for _, n := range []int{1, sampleInShort, sampleInFast, len(all) - 1, len(all)} {
		const today = 20_000
		missing := map[string]bool{}
		for _, c := range all {
			missing[c.name()] = true
		}
		for day := range (len(all) + n - 1) / n {
			some := sampleOf(all, n, uint64(today+day)) //nolint:gosec // it is small
			if len(some) != n {
				t.Errorf("a sample of %d has %d crashes", n, len(some))
			}
			for _, c := range some {
				delete(missing, c.name())
			}
		}
		if len(missing) > 0 {
			t.Errorf("samples of %d miss %v", n, slices.Sorted(maps.Keys(missing)))
		}
	}
}

// The tests of the crash matrix kill the server after each step of each operation, on several data directories side by
// side. After each kill the next server must have the bystanders as they were, a client that
// repeats its request must get what it wanted, and the audit must find nothing. A sample is of the
// day, or of -seed.
func TestCrashMatrixFirstPart(t *testing.T)  { crashPart(t, 0) }
func TestCrashMatrixSecondPart(t *testing.T) { crashPart(t, 1) }
func TestCrashMatrixThirdPart(t *testing.T)  { crashPart(t, 2) }

// crashPart tries one of the parts of the matrix. Parts are tests of their own, since subtests would begin after all other
// tests.
func crashPart(t *testing.T, part int) {
	t.Helper()
	t.Parallel()
	all := matrix()
	if n := sampleSize(len(all)); n < len(all) {
		day := *seed
		if day == 0 {
			day = uint64(time.Now().Unix() / (24 * 60 * 60)) //nolint:gosec // it is past 1970
		}
		t.Logf("%d of %d crashes; to repeat: go test ./test/e2e -run TestCrashMatrix -crash-sample=%d -seed=%d", n, len(all), n, day)
		all = sampleOf(all, n, day)
	}
	// Crashes of one mode follow each other, since a change of mode restarts the server.
	slices.SortStableFunc(all, func(a, b crash) int { return strings.Compare(a.op.storeAfter, b.op.storeAfter) })
	all = all[len(all)*part/crashFixtures : len(all)*(part+1)/crashFixtures]
	w := newFixture(t)
	began := time.Now()
	for _, c := range all {
		if !t.Run(c.name(), func(t *testing.T) { w.in(t).survives(c) }) {
			w.heal()
		}
	}
	t.Logf("%d crashes in %v", len(all), time.Since(began).Round(time.Second))
	w.resumeBystanders()
}

// survives takes the fixture through one crash.
func (w *fixture) survives(c crash) {
	w.t.Helper()
	w.mode(c.op.storeAfter)
	subject := c.op.prepare(w)
	w.calm()
	before := w.bystanders()
	w.arm(c.at)
	ctx, cancel := context.WithTimeout(w.t.Context(), startTime)
	var client sync.WaitGroup
	client.Go(func() { _ = c.op.do(ctx, w, subject) }) // the client retries after any result
	defer client.Wait()                                // also where the server does not die
	defer cancel()
	w.awaitKill(c.at)
	client.Wait()
	if c.then != "" {
		w.arm(c.then)
		w.begin()
		w.awaitKill(c.then)
	}
	w.disarm()
	w.start()
	w.same(before)
	again, cancel := context.WithTimeout(w.t.Context(), eventually.Patience) // two servers may have used up the first's
	defer cancel()
	eventually.NoError(w.t, "a client retries", func() error { return c.op.do(again, w, subject) })
	c.op.check(w, subject)
	w.same(before)
	w.only(subject)
	c.op.cleanup(w, subject)
	w.calm()
	w.clean()
}

// arm has the server die at a point.
func (w *fixture) arm(point string) {
	w.t.Helper()
	log, err := os.Stat(filepath.Join(w.dir, "log"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.since = log.Size()
	if err := os.WriteFile(w.armed+".new", []byte(point), 0o644); err != nil { //nolint:gosec // a server's process without root reads it
		w.t.Fatal(err)
	}
	if err := os.Rename(w.armed+".new", w.armed); err != nil {
		w.t.Fatal(err)
	}
}

func (w *fixture) disarm() {
	w.t.Helper()
	if err := os.Remove(w.armed); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
}

// awaitKill waits until the server is killed at the point that was armed.
func (w *fixture) awaitKill(point string) {
	w.t.Helper()
	name, _, _ := strings.Cut(point, ":")
	if w.value("BARCHAN_PRIVILEGES") == apart { // the node outlives a server's process that is killed
		eventually.True(w.t, "the server comes to "+point, func() bool { return strings.Contains(w.sinceArmed(), "failpoint "+name+": kill") })
		_ = w.cmd.Process.Kill()
	}
	select {
	case <-w.done: //nolint:errcheck // it was killed
		w.cmd = nil
		_ = w.log.Close()
	case <-time.After(eventually.Patience):
		w.disarm()
		w.t.Fatalf("the server never came to %s\n%s", point, w.tail())
	}
	if !strings.Contains(w.sinceArmed(), "failpoint "+name+": kill") {
		w.t.Fatalf("the server ended elsewhere than at %s\n%s", point, w.tail())
	}
}

// mode applies an operation's server settings.
func (w *fixture) mode(storeAfter string) {
	w.t.Helper()
	if w.cmd != nil && w.value("BARCHAN_STORE_AFTER") == storeAfter {
		return
	}
	w.set("BARCHAN_STORE_AFTER", storeAfter)
	w.stop(syscall.SIGKILL)
	w.start()
}

// heal restores the fixture after a failure, so that the next crash is independent.
func (w *fixture) heal() {
	w.t.Helper()
	w.disarm()
	if w.cmd == nil {
		w.start()
	}
	for _, id := range w.subjects() {
		w.removeObject(id)
	}
	w.calm()
	w.clean()
}
