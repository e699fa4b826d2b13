package netdev

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// fill creates the needed spares, without Run.
func fill(t testing.TB, n *Network) {
	t.Helper()
	for {
		made, err := n.addSpare()
		if err != nil {
			t.Fatal(err)
		}
		if !made {
			return
		}
	}
}

// run runs the network for the test, or until the function that it returns is called.
func run(t *testing.T, n *Network) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := n.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

func spareNames(t *testing.T, n *Network) []string {
	t.Helper()
	names, err := n.Spares(t.Context())
	must(t, err)
	return names
}

// leftOver lists the instance's links except its bridge.
func leftOver(t *testing.T, n *Network) []string {
	t.Helper()
	names, err := n.linksThat(func(name string) bool { return strings.HasPrefix(name, linkPrefix(n.cfg.NetnsPrefix)) })
	must(t, err)
	return names
}

func TestAttachUsesSpare(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 2 })
	fill(t, n)
	before := spareNames(t, n)
	if len(before) != 2 {
		t.Fatalf("spares %v, want 2", before)
	}
	links, err := n.Links(t.Context())
	must(t, err)
	ids, err := n.List(t.Context())
	must(t, err)
	if len(links) != 0 || len(ids) != 0 {
		t.Errorf("spares are shown as links %v or IDs %v", links, ids)
	}
	ep := endpoint(n, 1)
	at, err := n.Attach(t.Context(), ep)
	must(t, err)
	after := spareNames(t, n)
	if len(after) != 1 || !slices.Contains(before, after[0]) {
		t.Errorf("spares %v before, %v after", before, after)
	}
	must(t, inside(t, at.NetnsPath, func() error { return listen(t, "0.0.0.0:8080") }))
	if err := dial(t, ep.Address.String()+":8080", soon); err != nil {
		t.Errorf("attachment from a spare is unreachable: %v", err)
	}
	must(t, n.Detach(t.Context(), ep))
	if got := leftOver(t, n); len(got) != 1 {
		t.Errorf("links %v, want the spare alone", got)
	}
}

// A spare's port sends and receives nothing.
func TestSparesCarryNoTraffic(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 1 })
	fill(t, n)
	link, err := n.host.LinkByName(spareNames(t, n)[0])
	must(t, err)
	if link.Attrs().RawFlags&unix.IFF_UP != 0 {
		t.Error("it is up")
	}
	prot, err := n.host.LinkGetProtinfo(link)
	must(t, err)
	if !prot.Isolated {
		t.Error("its port is not isolated")
	}
	if keys := portKeysOf(t, n, link.Attrs().Name); len(keys) != 0 {
		t.Errorf("it is in the rules: %v", keys)
	}
}

// Another program removed a spare's link, or created a link with its new name.
func TestAttachDespiteBrokenSpares(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 1 })
	for name, breakIt := range map[string]func(ep Endpoint) error{
		"spare removed": func(Endpoint) error { return n.removeLink(spareNames(t, n)[0]) },
		"name taken": func(ep Endpoint) error {
			r, err := n.prepareNetns(n.HostLink(ep.ID))
			if err == nil {
				t.Cleanup(r.close)
			}
			return err
		},
		"partial attachment": func(ep Endpoint) error { // as after a crash
			r, err := n.prepareNetns(n.HostLink(ep.ID))
			if err == nil {
				err = bindNamespace(r.ns, n.NetnsPath(ep.ID))
				r.close()
			}
			return err
		},
		"file without a namespace": func(ep Endpoint) error { return placeholder(n.NetnsPath(ep.ID)) },
	} {
		t.Run(name, func(t *testing.T) {
			fill(t, n)
			ep := endpoint(n, 1)
			must(t, breakIt(ep))
			at, err := n.Attach(t.Context(), ep)
			must(t, err)
			must(t, inside(t, at.NetnsPath, func() error { return listen(t, "0.0.0.0:8080") }))
			if err := dial(t, ep.Address.String()+":8080", soon); err != nil {
				t.Error(err)
			}
			must(t, n.Detach(t.Context(), ep))
		})
	}
}

func TestRunRefills(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 3 })
	stop := run(t, n)
	full := func() bool { return len(spareNames(t, n)) == 3 }
	eventually.True(t, "3 spares", full)
	for i := range 3 {
		_, err := n.Attach(t.Context(), endpoint(n, i+1))
		must(t, err)
	}
	eventually.True(t, "3 spares after refill", full)
	stop()
	eventually.True(t, "no spares after Run", func() bool { return len(spareNames(t, n)) == 0 })
	if ids, err := n.List(t.Context()); err != nil || len(ids) != 3 {
		t.Errorf("List = %v, %v after the end of Run, want 3", ids, err)
	}
}

// Refilling pauses during an attachment, and continues afterwards.
func TestRefillPausesDuringAttach(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 1 })
	release := n.spares.pauseRefill()
	if made, err := n.addSpare(); err != nil || made {
		t.Errorf("made %v, %v during an attachment", made, err)
	}
	run(t, n)
	release()
	eventually.True(t, "a spare", func() bool { return len(spareNames(t, n)) == 1 })
}

// If spares cannot be created, Run retries and Attach returns the cause.
func TestRunRetries(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 1 })
	must(t, n.Destroy(t.Context())) // no bridge: every spare fails
	stop := run(t, n)
	if _, err := n.Attach(t.Context(), endpoint(n, 1)); err == nil {
		t.Error("attached without a bridge")
	}
	if got := leftOver(t, n); len(got) != 0 {
		t.Errorf("links %v remain after failures", got)
	}
	must(t, n.Open(t.Context()))
	eventually.True(t, "a spare", func() bool { return len(spareNames(t, n)) == 1 })
	stop()
}

// A link whose namespace is held open leaves the bridge at once and is deleted later.
func TestDetachDoesNotWait(t *testing.T) {
	n := testNetwork(t)
	n.spares.deleteDelay = time.Hour // the test inspects it before its deletion
	stop := run(t, n)
	eventually.True(t, "Run to run", n.spares.isRunning)
	ep := endpoint(n, 1)
	at, err := n.Attach(t.Context(), ep)
	must(t, err)
	must(t, inside(t, at.NetnsPath, func() error { return listen(t, "0.0.0.0:8080") })) // keeps it open
	must(t, n.Detach(t.Context(), ep))
	if links, err := n.Links(t.Context()); err != nil || len(links) != 0 {
		t.Errorf("ports %v, %v after Detach", links, err)
	}
	if got := leftOver(t, n); len(got) != 1 || !n.isMarkedForDelete(got[0]) {
		t.Errorf("links %v, want one to delete", got)
	}
	if err := dial(t, ep.Address.String()+":8080", never); err == nil {
		t.Error("what was detached is reached")
	}
	if _, err := n.Attach(t.Context(), ep); err != nil {
		t.Errorf("attach of the same endpoint: %v", err)
	}
	stop()
	if got := leftOver(t, n); len(got) != 1 || got[0] != n.HostLink(ep.ID) {
		t.Errorf("links %v, want the new one alone", got)
	}
}

// A killed process leaves no spares: the kernel removes them, or the next Open.
func TestKilledProcessLeavesNoSpares(t *testing.T) {
	if bridge := os.Getenv("BARCHAN_TEST_SPARES_BRIDGE"); bridge != "" {
		createSparesAndBlock(t, bridge)
		return
	}
	n := testNetwork(t, func(c *Config) { c.Spares = 3 })
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(),
		"BARCHAN_TEST_SPARES_BRIDGE="+n.cfg.Bridge, "BARCHAN_TEST_SPARES_SUBNET="+n.cfg.Subnet.String())
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	said := make([]byte, len(sparesExist))
	if _, err := io.ReadFull(out, said); err != nil || string(said) != sparesExist {
		rest, _ := io.ReadAll(out)
		t.Fatalf("the other process has no spares: %v: %s%s", err, said, rest)
	}
	if got := spareNames(t, n); len(got) != 3 {
		t.Errorf("spares %v of the other process, want 3", got)
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	must(t, n.Open(t.Context()))
	if got := leftOver(t, n); len(got) != 1 {
		t.Errorf("links %v, want the attached one alone", got)
	}
	if ids, err := n.List(t.Context()); err != nil || len(ids) != 1 {
		t.Errorf("List = %v, %v, want the attached one alone", ids, err)
	}
}

// Open removes links without an owner even if their namespaces are in use, and nothing else; the
// pool that had such a spare continues without it.
func TestOpenSweeps(t *testing.T) {
	n := testNetwork(t, func(c *Config) { c.Spares = 2 })
	_, err := n.Attach(t.Context(), endpoint(n, 1))
	must(t, err)
	other, err := New(n.cfg)
	must(t, err)
	defer other.Close()
	must(t, other.Open(t.Context()))
	fill(t, other)
	marked, err := other.prepareNetns(other.newLinkName(deleteMark))
	must(t, err)
	defer marked.close()
	if got := leftOver(t, n); len(got) != 4 {
		t.Fatalf("links %v, want an attached one, two spares and one to go", got)
	}
	must(t, n.Open(t.Context()))
	if got := leftOver(t, n); len(got) != 1 || got[0] != n.HostLink("i1") {
		t.Errorf("links %v, want the attached one alone", got)
	}
	if _, err := other.Attach(t.Context(), endpoint(n, 2)); err != nil {
		t.Errorf("attach with removed spares: %v", err)
	}
}

// createSparesAndBlock is the process that is killed.
// sparesExist is what the other process prints when it has spares.
const sparesExist = "ready"

func createSparesAndBlock(t *testing.T, bridge string) {
	tag := strings.TrimPrefix(bridge, "br")
	n, err := New(Config{
		Bridge: bridge, Table: "barchan-" + tag, NetnsPrefix: "bc" + tag + "-", Spares: 3,
		Subnet: netip.MustParsePrefix(os.Getenv("BARCHAN_TEST_SPARES_SUBNET")), Log: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	must(t, n.Open(t.Context()))
	fill(t, n)
	_, err = n.Attach(t.Context(), endpoint(n, 1))
	must(t, err)
	fill(t, n)
	_, err = os.Stdout.WriteString(sparesExist)
	must(t, err)
	<-t.Context().Done()
}

func TestConcurrentAttach(t *testing.T) {
	n := testNetwork(t, withSubnet6, func(c *Config) { c.Spares = 16 })
	stop := run(t, n)
	const many = 64
	var spares sync.Map // inode numbers of namespaces
	concurrently(many, func(i int) {
		ep := endpoint6(n, i+1)
		_, err := n.Attach(t.Context(), ep)
		var st unix.Stat_t
		if err = errors.Join(err, unix.Stat(n.NetnsPath(ep.ID), &st)); err != nil {
			t.Error(err)
		}
		if other, taken := spares.LoadOrStore(st.Ino, ep.ID); taken {
			t.Errorf("%s and %s are in one namespace", ep.ID, other)
		}
	})
	if links, err := n.Links(t.Context()); err != nil || len(links) != many {
		t.Errorf("%d links, %v, want %d", len(links), err, many)
	}
	concurrently(2*many, func(i int) { // half detach while as many attach and detach
		ep := endpoint6(n, i+1)
		var err error
		if i >= many {
			_, err = n.Attach(t.Context(), ep)
		}
		if err = errors.Join(err, n.Detach(t.Context(), ep)); err != nil {
			t.Error(err)
		}
	})
	stop()
	nothingLeft(t, n)
}

func concurrently(many int, do func(i int)) {
	var wg sync.WaitGroup
	for i := range many {
		wg.Go(func() { do(i) })
	}
	wg.Wait()
}

func nothingLeft(t *testing.T, n *Network) {
	t.Helper()
	if ids, err := n.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("IDs %v, %v", ids, err)
	}
	if links, err := n.Links(t.Context()); err != nil || len(links) != 0 {
		t.Errorf("links %v, %v", links, err)
	}
	if all, err := n.Neighbours(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("neighbours %v, %v", all, err)
	}
	if keys := portKeysOf(t, n, ""); len(keys) != 0 {
		t.Errorf("%d elements of rules", len(keys))
	}
	eventually.True(t, "the kernel to tidy up", func() bool { return len(leftOver(t, n)) == 0 })
}
