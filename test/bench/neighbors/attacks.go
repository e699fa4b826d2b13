package neighbors

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
)

// attack is what a tenant does that its neighbors shall not notice.
type attack struct {
	name string
	// inside is a Python program that root runs in the attackers' sandboxes.
	inside string
	// breaks means that the sandbox may not answer once it runs.
	breaks bool
	// outside runs in a process of its own until ctx is done.
	outside func(ctx context.Context, t *tenant, sandboxID string)
}

// attackPrelude has what the programs share. The name server is the host's side of the bridge: no packet goes further.
const attackPrelude = `
import errno, os, socket, sys, threading, time
def server():
    for line in open("/etc/resolv.conf"):
        if line.startswith("nameserver"):
            return line.split()[1]
def forever(f, processes=1):
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    while True:
        try:
            f()
        except (OSError, MemoryError):
            time.sleep(0.001)
`

// Check returns an error if a list for [Measure] has a name that is none.
func Check(only string) error {
	_, err := chosen(only)
	return err
}

// chosen returns the attacks of a list of names, or all.
func chosen(only string) (some []attack, err error) {
	all := attacks()
	if only == "" {
		return all, nil
	}
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(all, func(a attack) bool { return a.name == name })
		if i < 0 {
			var names []string
			for _, a := range all {
				names = append(names, strconv.Quote(a.name))
			}
			return nil, fmt.Errorf("%q is none of %s", name, strings.Join(names, ", "))
		}
		some = append(some, all[i])
	}
	return some, nil
}

func attacks() []attack {
	return []attack{
		{name: "fork bomb", inside: "forever(os.fork)\n", breaks: true},
		{name: "memory", inside: `
def hog():
    if os.fork() == 0:
        taken = []
        while True:
            taken.append(os.urandom(1 << 20) * 16)
    os.wait()
forever(hog)
`, breaks: true},
		{name: "full disk", inside: `
block = os.urandom(1 << 20)
def fill():
    with open("/fill", "wb", buffering=0) as f:
        try:
            while True:
                f.write(block)
        finally:
            os.unlink("/fill")
forever(fill)
`},
		{name: "inodes", inside: `
def make():
    os.makedirs("/many", exist_ok=True)
    i = 0
    try:
        while True:
            os.close(os.open("/many/%d" % i, os.O_CREAT | os.O_WRONLY))
            i += 1
    finally:
        for j in range(i):
            os.unlink("/many/%d" % j)
forever(make)
`},
		{name: "descriptors", inside: `
def take():
    taken = []
    try:
        while True:
            taken.append(os.open("/etc/passwd", os.O_RDONLY))
    finally:
        for fd in taken:
            os.close(fd)
forever(take, 16)
`},
		{name: "connections", inside: `
address, taken = server(), []
def connect():
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex((address, 53))
    taken.append(s)
    if len(taken) > 5000:
        taken.pop(0).close()
forever(connect, 4)
`},
		{name: "packets", inside: `
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((server(), 53))
forever(lambda: s.send(b"x"), 4)
`},
		{name: "logs", inside: `
out, text = os.open("/proc/1/fd/1", os.O_WRONLY), b"noise " * 1000 + b"\n"
forever(lambda: os.write(out, text), 2)
`},
		{name: "deep tree with snapshots", inside: `
def deepen():
    os.makedirs("/deep", exist_ok=True)
    os.chdir("/deep")
    for _ in range(4000):
        os.mkdir("d" * 255)
        os.chdir("d" * 255)
    time.sleep(3600)
forever(deepen)
`, outside: func(ctx context.Context, t *tenant, id string) {
			for ctx.Err() == nil {
				if _, err := t.rest.CreateSnapshot(ctx, id, client.SnapshotOptions{}); err != nil {
					pause(ctx)
				}
			}
		}},
		{name: "connections to the gateway", outside: func(ctx context.Context, t *tenant, _ string) { together(8, func() { t.hold(ctx) }) }},
		{name: "requests to its sandbox", outside: func(ctx context.Context, t *tenant, id string) { together(64, func() { t.flood(ctx, id) }) }},
		{name: "signed URLs of 18 kB", outside: func(ctx context.Context, t *tenant, _ string) { together(8, func() { t.sign(ctx) }) }},
		{name: "creates and kills", outside: func(ctx context.Context, t *tenant, _ string) { together(4, func() { t.churn(ctx) }) }},
	}
}

func pause(ctx context.Context) { _ = harness.Rest(ctx, 10*time.Millisecond) }

func together(n int, f func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(f)
	}
	all.Wait()
}
