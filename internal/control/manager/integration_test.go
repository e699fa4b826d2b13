package manager

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// realAPI is the real API server, with what managers over it share.
type realAPI struct {
	api *apiserver.Server
	// objects is the first manager's cache.
	objects *cache.Cache
	agents  *fakeAgents
}

// newReal returns a manager over the real API server, the real cache and the real picker; only what
// would run the sandboxes is a stand-in.
func newReal(t *testing.T) *Manager {
	t.Helper()
	m, _ := newRealAPI(t)
	return m
}

func newRealAPI(t *testing.T) (*Manager, *realAPI) {
	t.Helper()
	api := startAPI(t)
	w := &realAPI{api: api, agents: &fakeAgents{}}
	w.objects = w.cache(t)
	w.fulfil(t)
	for _, ns := range []string{team, templates.PublicNamespace} {
		err := w.objects.Live().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	if err := w.objects.Live().Create(t.Context(), fakecluster.Template(templates.PublicNamespace, "base", "base", fakecluster.Public())); err != nil {
		t.Fatal(err)
	}
	m, _ := w.manager(t, w.objects)
	await(t, func() bool { _, err := m.Templates.Get(t.Context(), team, "base"); return err == nil })
	return m, w
}

func startAPI(t *testing.T) *apiserver.Server {
	t.Helper()
	return embedded.APIServer(t)
}

// cache starts one more cache.
func (w *realAPI) cache(t *testing.T) *cache.Cache {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	objects, err := cache.New(ctx, cache.Config{REST: w.api.RESTConfig(apiserver.UserAdmin)})
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() { _ = objects.Run(ctx) })
	if err := objects.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	return objects
}

// fulfil has what sandboxes wish done until the test ends.
func (w *realAPI) fulfil(t *testing.T) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { control(ctx, t, w.objects) })
}

// manager returns a manager over a cache, with a picker and quotas of its own, and what counts its
// writes and the picker's.
func (w *realAPI) manager(t *testing.T, objects *cache.Cache, change ...func(*Config)) (*Manager, *counted) {
	t.Helper()
	writer := &counted{Objects: objects.Live()}
	members, err := picker.New(picker.Config{Writer: writer})
	if err != nil {
		t.Fatal(err)
	}
	quotas, err := quota.New(quota.Config{Reader: objects, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	assumed := assumecache.New(objects.Sandbox)
	synced, err := cache.On(t.Context(), objects, func(older, newer *agents.Sandbox) {
		assumed.Observe(older, newer)
		members.Observe(older, newer)
		quotas.Observe(older, newer)
	})
	if err != nil {
		t.Fatal(err)
	}
	<-synced
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Objects: writer, Cache: objects, Routes: route.NewTable(), Agents: &fakeWitness{}, Tokens: tokens, Log: telemetry.Discard(),
		Picker: members, Quota: quotas, Assumed: assumed, Binder: w.agents,
		StartTimeout: eventually.Patience, MoveTimeout: eventually.Patience, SettleTimeout: eventually.Patience, BindTimeout: eventually.Patience,
	}
	for _, c := range change {
		c(&cfg)
	}
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m, writer
}

// control fulfils the wishes in sandboxes until ctx is done, one change after the other.
func control(ctx context.Context, t *testing.T, objects *cache.Cache) {
	changes, captures := make(chan *agents.Sandbox, 10_000), make(chan *barchan.Checkpoint, 10_000)
	_, err := cache.On(ctx, objects, func(_, newer *agents.Sandbox) {
		if newer != nil {
			changes <- newer.DeepCopy()
		}
	})
	if err == nil {
		_, err = cache.On(ctx, objects, func(_, newer *barchan.Checkpoint) {
			if newer != nil {
				captures <- newer.DeepCopy()
			}
		})
	}
	if err != nil {
		t.Error(err)
		return
	}
	for {
		select {
		case s := <-changes:
			if err := fakecluster.Reconcile(ctx, objects.Live(), s); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
				t.Errorf("reconcile: %v", err)
			}
		case c := <-captures:
			if err := fakecluster.Capture(ctx, objects.Live(), c); err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
				t.Errorf("capture: %v", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// TestReadsShowWhatWasWritten goes through a sandbox's life on the real API server: each call's
// effect is there in the very next read.
func TestReadsShowWhatWasWritten(t *testing.T) {
	m := newReal(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 3 {
				if err := live(t.Context(), m, fmt.Sprint(i)); err != nil {
					t.Errorf("client %d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
	page, err := m.Sandboxes.List(t.Context(), sandboxes.ListRequest{Namespace: team})
	if err != nil || len(page.Items) != 0 {
		t.Errorf("List = %+v, %v", page, err)
	}
}

func live(ctx context.Context, m *Manager, owner string) error {
	metadata := map[string]string{"owner": owner}
	v, err := m.Creates.Create(ctx, creating.Request{Namespace: team, Template: "base", Timeout: 30 * time.Second, Secure: true, Metadata: metadata})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	id := string(v.ID)
	expect := func(state sandboxes.State, minutes int) error {
		page, err := m.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team, Metadata: metadata})
		if err != nil || len(page.Items) != 1 || page.Items[0].State != state {
			return fmt.Errorf("list shows %+v, want one that is %s: %w", page.Items, state, err)
		}
		// No other step leaves so much, however long this one took.
		most := time.Duration(minutes)*time.Minute + time.Second
		if left := time.Until(page.Items[0].EndAt); minutes > 0 && (left > most || left < most-2*time.Minute) {
			return fmt.Errorf("%s left, want %d minutes", left, minutes)
		}
		return nil
	}
	for _, step := range []struct {
		name    string
		do      func() error
		state   sandboxes.State
		minutes int
	}{
		{"extend", func() error { return m.Sandboxes.SetTimeout(ctx, team, id, 10*time.Minute) }, sandboxes.StateRunning, 10},
		{"shorten", func() error { return m.Sandboxes.SetTimeout(ctx, team, id, 5*time.Minute) }, sandboxes.StateRunning, 5},
		{"pause", func() error { return m.Sandboxes.Pause(ctx, team, id, nil) }, sandboxes.StatePaused, 0},
		{"connect", func() error { return second2(m.Sandboxes.Connect(ctx, team, id, 7*time.Minute, nil)) }, sandboxes.StateRunning, 7},
		{"network", func() error { return m.Sandboxes.SetNetwork(ctx, team, id, &agents.EgressPolicy{Internet: new(false)}) }, sandboxes.StateRunning, 7},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		if err := expect(step.state, step.minutes); err != nil {
			return fmt.Errorf("after %s: %w", step.name, err)
		}
	}
	if err := m.Sandboxes.Kill(ctx, team, id); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	if err := m.Sandboxes.Kill(ctx, team, id); !errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("second kill: %w", err)
	}
	return nil
}

func TestTheServersOwnRefusalsReachTheUser(t *testing.T) {
	m, w := newRealAPI(t)
	_, err := m.Creates.Create(t.Context(), creating.Request{Namespace: "no-such-team", Template: "base", Timeout: time.Minute})
	wantKind(t, err, errs.ErrNotFound, `"no-such-team" does not exist`)

	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "x"}}
	err = apistatus.From("create sandbox", m.Sandboxes.Objects.Create(t.Context(), s))
	wantKind(t, err, errs.ErrInvalid, "spec.podTemplate.spec.containers")

	k, secret, err := m.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: "laptop"})
	if err != nil {
		t.Fatal(err)
	}
	if identity, err := m.Keys.Authenticate(t.Context(), secret); err != nil || identity.Namespace != team || identity.Key != k.Name {
		t.Errorf("Authenticate at once = %+v, %v", identity, err)
	}
	testLastUse(t, m, w.objects.Live(), k, secret)
	if err := client.IgnoreNotFound(m.Sandboxes.Objects.Get(t.Context(), client.ObjectKey{Namespace: team, Name: "x"}, s)); err != nil {
		t.Error(err)
	}
}

// TestForksOnTheRealServer: the API server's rules hold for what forks write, and each effect is there in
// the very next read.
func TestForksOnTheRealServer(t *testing.T) {
	m, w := newRealAPI(t)
	ctx := t.Context()
	source := m.mustCreate(t, creating.Request{Namespace: team, Template: "base", Timeout: time.Hour, Secure: true, Metadata: map[string]string{"k": "v"}})
	got, err := m.Creates.Fork(ctx, creating.ForkRequest{Namespace: team, ID: string(source.ID), Count: 20, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for i, one := range got {
		if one.Err != nil || one.Sandbox.Metadata["k"] != "v" {
			t.Errorf("fork %d: %+v, %v", i, one.Sandbox, one.Err)
		}
	}
	if page, err := m.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team}); err != nil || len(page.Items) != 21 {
		t.Errorf("%d are listed, %v", len(page.Items), err)
	}
	await(t, func() bool {
		left, err := w.objects.Checkpoints(ctx, "")
		return err == nil && len(left) == 0
	})
	if err := m.Sandboxes.Pause(ctx, team, string(source.ID), nil); err != nil {
		t.Fatal(err)
	}
	if _, resumed, err := m.Sandboxes.Connect(ctx, team, string(source.ID), time.Minute, new(false)); err != nil || !resumed {
		t.Errorf("Connect = %v, %v", resumed, err)
	}
}

func (m *Manager) mustCreate(t *testing.T, req creating.Request) sandboxes.Sandbox {
	t.Helper()
	v, err := m.Creates.Create(t.Context(), req)
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return v
}

// TestSnapshotsOnTheRealServer does the same for snapshots.
func TestSnapshotsOnTheRealServer(t *testing.T) {
	m := newReal(t)
	ctx := t.Context()
	source := m.mustCreate(t, creating.Request{Namespace: team, Template: "base", Timeout: time.Hour, Secure: true})
	snap, err := m.Snapshots.Create(ctx, snapshots.Request{Namespace: team, ID: string(source.ID), Name: "mine:v1", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if page, _, err := m.Snapshots.List(ctx, snapshots.ListRequest{Namespace: team}); err != nil || len(page) != 1 || page[0].ID != snap.ID {
		t.Errorf("Snapshots = %+v, %v", page, err)
	}
	if again := m.mustCreate(t, creating.Request{Namespace: team, Template: snap.ID, Timeout: time.Hour}); again.TemplateID != source.TemplateID {
		t.Errorf("Create = %+v", again)
	}
	if err := m.Snapshots.Delete(ctx, team, snap.ID); err != nil {
		t.Error(err)
	}
	if err := m.Snapshots.Delete(ctx, team, snap.ID); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("Delete again = %v", err)
	}
}

// testLastUse has the use of a key written once, and not again within the hour.
func testLastUse(t *testing.T, m *Manager, api client.Client, key apikeys.Key, secret string) {
	t.Helper()
	m.Keys.WriteUses(t.Context(), api)
	eventually.True(t, "the use is listed", func() bool {
		list, err := m.Keys.List(t.Context(), team)
		return err == nil && len(list) == 1 && list[0].LastUsedAt != nil && time.Since(*list[0].LastUsedAt) < time.Minute
	})
	version := func() string {
		var k barchan.APIKey
		if err := api.Get(t.Context(), client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, &k); err != nil {
			t.Fatal(err)
		}
		return k.ResourceVersion
	}
	before := version()
	if _, err := m.Keys.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	m.Keys.WriteUses(t.Context(), api)
	if after := version(); after != before {
		t.Errorf("a second use was written: version %s, then %s", before, after)
	}
}
