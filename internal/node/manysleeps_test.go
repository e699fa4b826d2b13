package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"
	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// One sandbox is suspended and resumed many times, and continues to count.
func TestManySleeps(t *testing.T) {
	t.Parallel()
	times := 50
	if testing.Short() || os.Getenv("TEST_PART") == "fast" {
		times = 10
	}
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for i := range times {
		suspendMemory(t, n, s)
		if i%3 > 0 { // else it may still be on its way to disk
			awaitStored(t, n, s)
		}
		if i%10 == 9 {
			stop()
			n, stop = m.node(atOnce)
		}
		resume(t, n, s)
		p.continues(n)
	}
	noMemory(t, n)
	clean(t, n)
	stop()
}

// A client with an open stream gets its end when the memory goes to disk, while the sandbox
// is stored, and the process at its other end continues.
func TestStreamsEndWithTheSleep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(atOnce)
	s := object()
	ensure(t, n, s)
	agent, err := n.Agent(t.Context(), refOf(s))
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	req := connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "echo ready; sleep 1000"}}})
	req.Header().Set("Authorization", "Basic cm9vdDo=") // root
	stream, err := agent.Process().Start(ctx, req)
	must(t, err)
	defer func() { _ = stream.Close() }()
	var pid uint32
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		pid = max(pid, event.GetStart().GetPid())
		if strings.Contains(string(event.GetData().GetStdout()), "ready") {
			break
		}
	}
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	for stream.Receive() { // it must end on its own
	}
	if err := stream.Err(); err == nil || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
		t.Errorf("the stream ended with %v", err)
	} else {
		t.Logf("the stream ended with: %v", err)
	}
	resume(t, n, s)
	if out, code := run(t, n, s, fmt.Sprintf("kill -0 %d && echo lives", pid)); code != 0 || out != "lives\n" {
		t.Errorf("process %d: %d %q", pid, code, out)
	}
}

// storedCost is what a server may hold in memory for one stored sandbox, in bytes.
const storedCost = 64 << 10

// A stored sandbox costs the server little memory and not one process, from a start on.
// It is not parallel: other tests use the heap too.
func TestCostOfSleepers(t *testing.T) {
	const count = 200
	m := newMachine(t)
	n, stop := m.node()
	s := object()
	ensure(t, n, s)
	suspendOnDisk(t, n, s)
	one := *n.handles.Lookup(s.UID).Row()
	nothingRuns(t, n, string(one.Plan.ID))
	var rows []*journal.Row
	for i := range count {
		r := one
		r.Plan.Ref.UID, r.Plan.Ref.Name = types.UID(uuid.NewString()), fmt.Sprint("stored-", i)
		r.Plan.ID, r.Address = sandbox.IDOf(r.Plan.Ref.UID), netip.Addr{}
		r.Kept = agents.SuspendDelete // but for the row there is nothing of them on the machine
		rows = append(rows, &r)
	}
	must(t, n.db.Update(func(tx *bolt.Tx) error { // as they are, not by the moves that lead there
		for _, r := range rows {
			value, err := json.Marshal(r)
			if err = errors.Join(err, tx.Bucket([]byte("sandboxes")).Put([]byte(r.Plan.Ref.UID), value)); err != nil {
				return err
			}
		}
		return nil
	}))
	stop()
	before, goroutines := heap(), runtime.NumGoroutine()
	n, stop = m.node()
	defer stop()
	held, more := int64(heap())-int64(before), runtime.NumGoroutine()-goroutines
	t.Logf("%d stored sandboxes: %d bytes of heap for each, %d goroutines more in all, the node's own included", count+1, held/(count+1), more)
	if held/(count+1) > storedCost {
		t.Errorf("%d bytes for each stored sandbox, want at most %d", held/(count+1), storedCost)
	}
	if more > count/2 {
		t.Errorf("%d goroutines for %d stored sandboxes", more, count+1)
	}
	if all, err := n.List(t.Context()); err != nil || len(all) != count+1 {
		t.Errorf("%d sandboxes, %v", len(all), err)
	}
	if left, err := n.inventory.Processes(map[string]bool{}); err != nil || len(left) > 0 {
		t.Errorf("processes %v, %v", left, err)
	}
	for _, r := range rows {
		must(t, n.journal.Remove(r.Plan.Ref))
		n.handles.Drop(n.handles.Lookup(r.Plan.Ref.UID))
	}
}

func suspendOnDisk(t *testing.T, n *Node, s interface{ GetUID() types.UID }) {
	t.Helper()
	u := n.handles.Lookup(s.GetUID())
	n.suspender.StoreAfter = time.Nanosecond // read by the next Suspend alone
	if _, err := n.Suspend(t.Context(), u.Ref, ""); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "its memory is on disk", func() bool { return u.Row().Stage == journal.Stored })
}

// heap is what is in use of it after a collection.
func heap() uint64 {
	var s runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// BenchmarkVerifiedWake is from disk to an agent that answers, and of that the reading through of
// the memory, which runs beside network and mount.
func BenchmarkVerifiedWake(b *testing.B) {
	for _, mib := range []int{0, 256, 1024} {
		b.Run(fmt.Sprintf("%dMiB", mib), func(b *testing.B) {
			m := newMachine(b)
			var verify time.Duration
			n, _ := m.node(atOnce, func(c *Config) {
				c.DefaultLimits.Memory = 2 << 30
				c.ObserveStep = func(_, step string, took time.Duration) {
					if step == "verify" {
						verify += took
					}
				}
			})
			s := object()
			ensure(b, n, s)
			if mib > 0 {
				run(b, n, s, fmt.Sprintf("dd if=/dev/urandom of=/dev/shm/big bs=1M count=%d", mib))
			}
			for b.Loop() {
				b.StopTimer()
				suspendMemory(b, n, s)
				eventually.True(b, "its memory is on disk", func() bool { return stageOf(n, s) == journal.Stored })
				b.StartTimer()
				if _, err := n.Resume(b.Context(), refOf(s), false); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(verify.Milliseconds())/float64(b.N), "verify-ms/op")
			if class := n.handles.Lookup(s.UID).Row().Plan.Class; class != oci.GVisor {
				b.Errorf("class %s", class)
			}
		})
	}
}
