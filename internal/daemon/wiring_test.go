package daemon

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/migrate"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/front"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/staleness"
	"github.com/barchan-dev/barchan/internal/daemon/upgrade"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
	"github.com/barchan-dev/barchan/internal/node/ctrd/supervisor"
	"github.com/barchan-dev/barchan/internal/testkit/fakeapi"
)

// wired is a daemon that has not begun to boot.
func wired(t *testing.T, role string) *Daemon {
	t.Helper()
	cfg := config.Default()
	cfg.DataDir, cfg.NodeName, cfg.Role = t.TempDir(), "n", role
	cfg.RunDir, cfg.TokenSecret = filepath.Join(cfg.DataDir, "run"), filepath.Join(cfg.DataDir, "secret")
	if role != config.RoleServer {
		cfg.APIKubeconfig, cfg.AgentImage = "/nowhere", "agent"
	}
	d, err := New(Config{Config: cfg, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func names(phases []boot.Phase) (list []string) {
	for _, p := range phases {
		list = append(list, p.Name)
	}
	return list
}

// TestObservedObjectsAreNotAssumed: a write whose event came before its answer is not assumed, as lists show it.
func TestObservedObjectsAreNotAssumed(t *testing.T) {
	d := wired(t, config.RoleReplica)
	d.objects = struct{ sandboxes.Objects }{} // nothing is written
	if err := d.makeTables(t.Context()); err != nil {
		t.Fatal(err)
	}
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "box", UID: "1", ResourceVersion: "7"}}
	for _, observe := range d.observers {
		observe(nil, s)
	}
	d.assumed.Assume(t.Context(), s)
	if d.assumed.Has(func(*agents.Sandbox) bool { return true }) {
		t.Error("assumed, though lists show it")
	}
}

// TestBootOrder checks the declared order, and that the declared needs force it: no phase may run before its predecessor,
// except for the listed pairs.
func TestBootOrder(t *testing.T) {
	for role, independent := range map[string][]string{
		config.RoleServer:  {"defaults, caches"},
		config.RoleReplica: nil, config.RoleController: nil, config.RoleNode: nil,
	} {
		phases := wired(t, role).bootPhases()
		if err := boot.Check(phases); err != nil {
			t.Fatalf("%s: %v", role, err)
		}
		for i := 1; i < len(phases); i++ {
			swapped := slices.Clone(phases)
			swapped[i-1], swapped[i] = swapped[i], swapped[i-1]
			pair := phases[i-1].Name + ", " + phases[i].Name
			if refused := boot.Check(swapped) != nil; refused == slices.Contains(independent, pair) {
				t.Errorf("%s: exchanged %s: refused %v", role, pair, refused)
			}
		}
	}
}

// TestDocumentedOrder compares the lists of phases in the package comment and in ARCHITECTURE.md with the code.
func TestDocumentedOrder(t *testing.T) {
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	phasesOf := func(role string) []string { return names(wired(t, role).bootPhases()) }
	server, replica, cluster, node := phasesOf(config.RoleServer), phasesOf(config.RoleReplica), phasesOf(config.RoleController), phasesOf(config.RoleNode)
	doc := read("doc.go")
	var documented []string
	for _, m := range regexp.MustCompile(`(?m)^//\t([a-z-]+)  +\S`).FindAllStringSubmatch(doc, -1) {
		documented = append(documented, m[1])
	}
	if !slices.Equal(documented, server) {
		t.Errorf("doc.go lists %v, the server's phases are %v", documented, server)
	}
	for _, phases := range [][]string{replica, cluster, node} {
		if want := "//\t" + strings.Join(phases, ", ") + "\n"; !strings.Contains(doc, want) {
			t.Errorf("doc.go lacks %q", want)
		}
	}
	architecture := regexp.MustCompile(` \([^)]*\)`).ReplaceAllString(read("../../ARCHITECTURE.md"), "")
	for _, phases := range [][]string{server, replica, cluster, node} {
		if want := strings.Join(phases, " → "); !strings.Contains(architecture, want) {
			t.Errorf("ARCHITECTURE.md lacks %q", want)
		}
	}
}

// apart is a server whose node is a process of its own.
const apart = ", apart"

// TestServices lists every background service of each role with all settings. Each is started by boot.Run.
func TestServices(t *testing.T) {
	for role, want := range map[string]string{
		config.RoleServer: "lock: lock; bind: LISTENERS; open-node: node files; api: apiserver; caches: cache; node: containerd, node, containerd health, image collector; " +
			"routes: binder, routes, quotas; peers: peers; manager: manager, key uses; controllers: events, repairs, sandboxes, checkpoints, volumes, warm-ups, template builds, history, pools, claims; serve: idle, dashboard, gateway",
		config.RoleController: "lock: lock; bind: LISTENERS; caches: cache; pools: binder, routes; election: events, election",
		config.RoleReplica:    "lock: lock; bind: LISTENERS; caches: cache; routes: binder, routes, quotas, watch proof; peers: peers; manager: manager, key uses; serve: dashboard, gateway",
		config.RoleNode: "lock: lock; bind: LISTENERS; open-node: node files; caches: cache; node: containerd, node, containerd health, image collector; " +
			"claims: claims; controllers: events, repairs, sandboxes, checkpoints, volumes; serve: node socket",
		apart: "lock: lock; bind: LISTENERS; api: apiserver; caches: cache; node: node watch; routes: binder, routes, quotas; peers: peers; " +
			"manager: manager, key uses; controllers: events, warm-ups, template builds, history, pools, claims; serve: idle, dashboard, gateway",
	} {
		d := wired(t, cmp.Or(strings.TrimSuffix(role, apart), config.RoleServer))
		d.secure, d.acme, d.peers, d.binder = &front.HTTP{}, &acme.Manager{}, &peers.Replica{}, &agentclient.Client{}
		switch role {
		case config.RoleServer, config.RoleNode:
			d.machine = &machine.Machine{Supervisor: &supervisor.Supervisor{}}
		case apart:
			d.cfg.NodeSocket = "/nowhere/node.sock"
			if err := d.makeNode(t.Context()); err != nil {
				t.Fatal(err)
			}
		case config.RoleReplica:
			d.watches = &staleness.ShortWatches{}
		}
		var got []string
		for _, p := range d.bootPhases() {
			if p.Services == nil {
				continue
			}
			var started []string
			for _, s := range p.Services() {
				started = append(started, s.Name)
			}
			if len(started) > 0 {
				got = append(got, p.Name+": "+strings.Join(started, ", "))
			}
		}
		want = strings.Replace(want, "LISTENERS", "http, https, acme, disk, writes, admin", 1)
		if got := strings.Join(got, "; "); got != want {
			t.Errorf("%s starts\n%s, want\n%s", role, got, want)
		}
	}
}

// TestMigratePhases has each of the two phases run the steps of its own stage.
func TestMigratePhases(t *testing.T) {
	d := wired(t, config.RoleServer)
	d.before = upgrade.Before{Used: true, Settings: d.cfg.Config}
	if err := phase(t, d, "migrate").Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := d.migrations.Pending(migrate.Storage); len(left) > 0 || len(d.migrations.Entries()) == 0 {
		t.Errorf("after the phase migrate: %v are pending", left)
	}
	ran := false
	var err error
	d.migrations, err = migrate.Open(migrate.Config{File: filepath.Join(t.TempDir(), "ledger"), Log: telemetry.Discard(), Steps: []migrate.Step{
		{ID: "objects", Stage: migrate.Objects, Do: func(context.Context) error { ran = true; return nil }},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := phase(t, d, "migrate-objects").Run(t.Context()); err != nil || !ran {
		t.Errorf("the phase migrate-objects = %v; the step was run: %v", err, ran)
	}
}

// TestTrustOrProofs cuts a replica off from its API server: its routes are trusted for a while, or without end if agents prove
// themselves. New work is refused in both cases.
func TestTrustOrProofs(t *testing.T) {
	for _, proofs := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			api := fakeapi.New()
			owned := member("owned", "")
			api.Add("sandboxes", owned)
			d := wired(t, config.RoleReplica)
			d.rest = api.Config()
			d.tokens, _ = sandbox.NewTokens(make([]byte, 32))
			d.started, d.stale, d.watches = time.Now(), time.Minute, staleness.NewShortWatches(time.Minute)
			if proofs {
				d.verifier = identity.NewVerifier(d.tokens)
			}
			stack := newStack(t)
			done(t, booting(t, d, stack, phase(t, d, "caches")))
			done(t, booting(t, d, stack, phase(t, d, "routes")))
			if !d.routes.Synced() || d.health.Err() != nil {
				t.Errorf("proofs %v: after the boot: synced %v, %v", proofs, d.routes.Synced(), d.health.Err())
			}
			defer api.Hold("sandboxes")()
			time.Sleep(3 * time.Minute)
			_, found := d.routes.Lookup(sandbox.IDOf(owned.UID))
			if d.routes.Synced() != proofs || found != proofs || d.health.Err() == nil {
				t.Errorf("proofs %v: cut off: synced %v, found %v, new work is refused with %v", proofs, d.routes.Synced(), found, d.health.Err())
			}
		})
	}
}

// phase returns a phase of the daemon without its needs.
func phase(t *testing.T, d *Daemon, name string) boot.Phase {
	t.Helper()
	phases := d.bootPhases()
	i := slices.IndexFunc(phases, func(p boot.Phase) bool { return p.Name == name })
	if i < 0 {
		t.Fatalf("no phase %q", name)
	}
	p := phases[i]
	p.Needs = nil
	return p
}

// newStack returns a stack that stops at the end of the test.
func newStack(t *testing.T) *lifecycle.Stack {
	t.Helper()
	stack := &lifecycle.Stack{}
	t.Cleanup(func() {
		if err := stack.Stop(); err != nil {
			t.Error(err)
		}
	})
	return stack
}

// booting runs one phase in the background; result receives what boot.Run returns.
func booting(t *testing.T, d *Daemon, stack *lifecycle.Stack, p boot.Phase) (result chan error) {
	t.Helper()
	result = make(chan error, 1)
	go func() { result <- boot.Run(t.Context(), []boot.Phase{p}, d.progress, stack) }()
	return result
}

// pending requires that a phase is not over after a minute of the bubble's time.
func pending(t *testing.T, result chan error, what string) {
	t.Helper()
	select {
	case err := <-result:
		t.Fatalf("the phase is over before %s: %v", what, err)
	case <-time.After(time.Minute):
	}
}

// done requires that a phase is over within a minute of the bubble's time.
func done(t *testing.T, result chan error) {
	t.Helper()
	select {
	case err := <-result:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the phase is not over")
	}
}

// TestCachesPhaseWaitsForEveryKind holds the list of one kind after the other. A replica does not list what it does not read.
func TestCachesPhaseWaitsForEveryKind(t *testing.T) {
	for kind, listed := range map[string]bool{
		"sandboxes": true, "sandboxtemplates": true, "sandboxwarmpools": true, "apikeys": true, "checkpoints": true, "namespaces": true,
		"sandboxclaims": false, "templaterevisions": false, "templatebuilds": false,
	} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := fakeapi.New()
				release := api.Hold(kind)
				d := wired(t, config.RoleReplica)
				d.rest = api.Config()
				result := booting(t, d, newStack(t), phase(t, d, "caches"))
				if listed {
					pending(t, result, "all kinds are listed")
					release()
				}
				done(t, result)
				if !listed {
					release()
				}
			})
		})
	}
}

// TestCachesPhaseReportsTheCachesError has the cache run already, so that its second run fails.
func TestCachesPhaseReportsTheCachesError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fakeapi.New()
		defer api.Hold("sandboxes")()
		d := wired(t, config.RoleReplica)
		d.rest = api.Config()
		p := phase(t, d, "caches")
		if err := p.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() { first <- d.cache.Run(ctx) }()
		synctest.Wait()
		p.Run = nil
		select {
		case err := <-booting(t, d, newStack(t), p):
			if !errors.Is(err, errs.ErrConflict) {
				t.Errorf("boot = %v, want the error of the cache", err)
			}
		case <-time.After(time.Minute):
			t.Error("the phase waits although the cache has failed")
		}
		cancel()
		if err := <-first; err != nil {
			t.Error(err)
		}
	})
}

// runningSandbox is the object of a running sandbox.
func runningSandbox(name string) *agents.Sandbox {
	return &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name), ResourceVersion: "7"},
		Status: agents.SandboxStatus{
			PodIPs:     []string{"10.0.0.2"},
			Conditions: []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}},
		},
	}
}

// member is a ready sandbox; of a warm pool if pool is set.
func member(name, pool string) *agents.Sandbox {
	s := runningSandbox(name)
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "base"}}
	if pool != "" {
		s.Labels = map[string]string{agents.LabelWarmPoolSandbox: pool}
	}
	return s
}

// TestRoutesPhaseWaitsForEveryObserver blocks the last observer.
func TestRoutesPhaseWaitsForEveryObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := fakeapi.New()
		owned := member("owned", "")
		api.Add("sandboxes", owned, member("spare", "pool"))
		d := wired(t, config.RoleReplica)
		d.rest = api.Config()
		d.tokens, _ = sandbox.NewTokens(make([]byte, 32))
		d.started, d.stale, d.watches = time.Now(), time.Hour, staleness.NewShortWatches(time.Hour)
		stack := newStack(t)
		done(t, booting(t, d, stack, phase(t, d, "caches")))
		p := phase(t, d, "routes")
		if err := p.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		held := make(chan struct{})
		release := sync.OnceFunc(func() { close(held) })
		defer release()
		d.observers = append(d.observers, func(_, _ *agents.Sandbox) { <-held })
		p.Run = nil
		result := booting(t, d, stack, p)
		pending(t, result, "every observer has received all sandboxes")
		if d.routes.Synced() {
			t.Error("the routes are marked as complete too early")
		}
		release()
		done(t, result)
		if !d.routes.Synced() {
			t.Error("the routes are not marked as complete")
		}
		if _, ok := d.routes.Lookup(sandbox.IDOf(owned.UID)); !ok || d.routes.Len() != 1 {
			t.Errorf("%d routes, want one of the owned sandbox", d.routes.Len())
		}
		if n := d.picker.Ready("pool", types.NamespacedName{}, ""); n != 1 {
			t.Errorf("the picker has %d ready members, want 1", n)
		}
		if running, _ := d.quotas.Used("default"); running.Sandboxes != 1 {
			t.Errorf("the quotas count %d running sandboxes, want 1", running.Sandboxes)
		}
	})
}
