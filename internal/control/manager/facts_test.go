package manager

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func TestTemplates(t *testing.T) {
	f := newFixture(t)
	base, err := f.Templates.Get(t.Context(), team, "base")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"default-base", base.ID, "base:default", templates.PublicNamespace + "/base"} {
		if got, err := f.Templates.Get(t.Context(), team, name); err != nil || got.ID != base.ID {
			t.Errorf("Template(%q) = %q, %v", name, got.ID, err)
		}
	}
	// A tenant's own template goes before a public one of the same name.
	if err := f.cluster.Create(t.Context(), fakecluster.Template(team, "base", "other")); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Templates.Get(t.Context(), team, "base"); err != nil || got.Namespace != team {
		t.Errorf("Template = %+v, %v", got, err)
	}
	var names []string
	cursor := ""
	for {
		page, next, err := f.Templates.List(t.Context(), team, 2, cursor)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range page {
			names = append(names, x.Namespace+"/"+x.Name)
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	slices.Sort(names)
	if want := []string{"barchan-system/base", "team-a/base", "team-a/broken", "team-a/sized", "team-a/slow"}; !slices.Equal(names, want) {
		t.Errorf("templates are %v, want %v", names, want)
	}
}

func TestAKeyIsStoredAsItsHash(t *testing.T) {
	f := newFixture(t)
	k, secret, err := f.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: "laptop"})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(secret, barchan.KeyPrefix) || len(secret) != len(barchan.KeyPrefix)+40 || k.Prefix != secret[:10] {
		t.Errorf("key %q, prefix %q", secret, k.Prefix)
	}
	var stored barchan.APIKey
	if err := f.cluster.Get(t.Context(), client.ObjectKey{Namespace: team, Name: k.Name}, &stored); err != nil || stored.Spec.SHA256 != barchan.HashKey(secret) {
		t.Errorf("stored %+v, %v", stored.Spec, err)
	}
	wantKind(t, second2(f.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: " "})), errs.ErrInvalid, "name")
	past := time.Now().Add(-time.Second)
	wantKind(t, second2(f.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: "x", ExpiresAt: &past})), errs.ErrInvalid, "expiresAt")
}

func TestAuthenticate(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	k, secret, err := f.Keys.Create(ctx, apikeys.Identity{Namespace: team}, apikeys.New{Description: "laptop"})
	if err != nil {
		t.Fatal(err)
	}
	if identity, err := f.Keys.Authenticate(ctx, secret); err != nil || identity.Namespace != team {
		t.Errorf("Authenticate = %+v, %v", identity, err)
	}
	for _, wrong := range []string{"", "e2b_", secret[:len(secret)-1], secret + "0", strings.ToUpper(secret), strings.Repeat("x", 10000)} {
		if _, err := f.Keys.Authenticate(ctx, wrong); !errors.Is(err, errs.ErrUnauthenticated) {
			t.Errorf("Authenticate(%.20q) = %v", wrong, err)
		}
	}
	wantKind(t, f.Keys.Delete(ctx, apikeys.Identity{Namespace: "team-b"}, k.ID), errs.ErrNotFound, k.ID)
	if err := f.Keys.Delete(ctx, apikeys.Identity{Namespace: team}, k.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Keys.Authenticate(ctx, secret); !errors.Is(err, errs.ErrUnauthenticated) {
		t.Errorf("a deleted key: %v", err)
	}
}

func TestKeysExpire(t *testing.T) { synctest.Test(t, testKeysExpire) }

func testKeysExpire(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	soon := time.Now().Add(time.Minute)
	if _, _, err := f.Keys.Create(ctx, apikeys.Identity{Namespace: team}, apikeys.New{Description: "long"}); err != nil {
		t.Fatal(err)
	}
	_, brief, err := f.Keys.Create(ctx, apikeys.Identity{Namespace: team}, apikeys.New{Description: "brief", ExpiresAt: &soon})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Keys.Authenticate(ctx, brief); err != nil {
		t.Errorf("before its end: %v", err)
	}
	time.Sleep(time.Minute)
	if _, err := f.Keys.Authenticate(ctx, brief); !errors.Is(err, errs.ErrUnauthenticated) || !strings.Contains(errs.Text(err), "the API key expired at "+soon.UTC().Format(time.RFC3339)) {
		t.Errorf("at its end: %v", err)
	}
	if list, err := f.Keys.List(ctx, team); err != nil || len(list) != 2 || list[0].Description == "" {
		t.Errorf("Keys = %+v, %v", list, err)
	}
}

// TestFreshKeyWorksBeforeTheCacheHasIt uses a cache that never learns of keys.
func TestFreshKeyWorksBeforeTheCacheHasIt(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Cache = keyless{c.Cache} })
	k, secret, err := f.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: "new"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Keys.Authenticate(t.Context(), secret); err != nil {
		t.Errorf("Authenticate: %v", err)
	}
	if err := f.cluster.Delete(t.Context(), &barchan.APIKey{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: k.Name}}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Keys.Authenticate(t.Context(), secret); !errors.Is(err, errs.ErrUnauthenticated) {
		t.Errorf("a deleted key: %v", err)
	}
}

type keyless struct{ Cache }

func (keyless) APIKeyByHash(context.Context, string) (*barchan.APIKey, error) {
	return nil, errs.ErrNotFound
}

// Issue 11: samples had the machine's disk, which is 4 TiB for the fixture's agent.
func TestMetricsOfTheDisk(t *testing.T) {
	f := newFixture(t)
	a := f.mustCreate(t, request("base"))
	got, err := f.Sandboxes.Metrics(t.Context(), team, string(a.ID), time.Time{}, time.Time{})
	if err != nil || len(got) != 1 || got[0].DiskUsed != 4096 || got[0].DiskTotal != uint64(a.Size.DiskMB)<<20 {
		t.Errorf("Metrics = %+v, %v", got, err)
	}
}

// TestMetricsOverTime: samples of before the create are another sandbox's, and the machine's disk is not the sandbox's.
func TestMetricsOverTime(t *testing.T) {
	f := newFixture(t)
	a := f.mustCreate(t, request("base"))
	now := time.Now().Unix()
	f.witness.history = []envd.Metrics{
		{Timestamp: now - 100, MemUsed: 1},
		{Timestamp: now + 1, MemUsed: 2, DiskUsed: 5, DiskTotal: 1 << 20},
		{Timestamp: now + 2, MemUsed: 3, DiskUsed: 1 << 40, DiskTotal: 1 << 42},
	}
	total := uint64(a.Size.DiskMB) << 20
	got, err := f.Sandboxes.Metrics(t.Context(), team, string(a.ID), time.Time{}, time.Time{})
	if err != nil || len(got) != 3 || got[0].MemUsed != 2 || got[0].DiskUsed != 5 || got[1].DiskUsed != 4096 || got[0].DiskTotal != total || got[2].MemUsed != 7 {
		t.Errorf("Metrics = %+v, %v", got, err)
	}
	got, err = f.Sandboxes.Metrics(t.Context(), team, string(a.ID), time.Unix(now+1, 0), time.Unix(now, 0).Add(500*time.Millisecond))
	if err == nil || got != nil {
		t.Errorf("an interval that ends before it starts: %+v, %v", got, err)
	}
	got, err = f.Sandboxes.Metrics(t.Context(), team, string(a.ID), time.Unix(now+2, 0), time.Unix(now+2, 0))
	if err != nil || len(got) != 1 || got[0].MemUsed != 3 {
		t.Errorf("Metrics of two seconds = %+v, %v", got, err)
	}
}

func TestMetricsAndLogs(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	a, b := f.mustCreate(t, request("base")), f.mustCreate(t, request("base"))
	if err := f.Sandboxes.Pause(ctx, team, string(b.ID), nil); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Sandboxes.Metrics(ctx, team, string(a.ID), time.Time{}, time.Time{}); err != nil || len(got) != 1 || got[0].MemUsed != 7 {
		t.Errorf("Metrics = %+v, %v", got, err)
	}
	if got, err := f.Sandboxes.Metrics(ctx, team, string(a.ID), time.Time{}, time.Now().Add(-time.Hour)); err != nil || len(got) != 0 {
		t.Errorf("Metrics of an hour ago = %+v, %v", got, err)
	}
	many, err := f.Sandboxes.MetricsOf(ctx, team, []string{string(a.ID), string(b.ID), "nonsense", string(a.ID)})
	if err != nil || len(many) != 1 || many[string(a.ID)].MemUsed != 7 {
		t.Errorf("MetricsOf = %+v, %v", many, err)
	}
	_, err = f.Sandboxes.Logs(ctx, team, string(b.ID), sandboxes.LogRequest{})
	wantKind(t, err, errs.ErrConflict, "is paused; resume it first")
	now := time.Now()
	f.witness.lines = []envd.LogLine{
		{Timestamp: now.Add(-2 * time.Second), Stream: envd.StreamStdout, Line: "one"},
		{Timestamp: now.Add(-time.Second), Stream: envd.StreamStderr, Line: "two"},
		{Timestamp: now, Stream: envd.StreamStdout, Line: "three"},
	}
	for name, give := range map[string]struct {
		req         sandboxes.LogRequest
		enqueueDial string
	}{
		"all":      {sandboxes.LogRequest{}, "one two three"},
		"from":     {sandboxes.LogRequest{From: now.Add(-time.Second)}, "two three"},
		"limit":    {sandboxes.LogRequest{Limit: 1}, "one"},
		"backward": {sandboxes.LogRequest{Backward: true, Limit: 2}, "three two"},
		"before":   {sandboxes.LogRequest{Backward: true, From: now.Add(-time.Second)}, "two one"},
		"search":   {sandboxes.LogRequest{Contains: "o", AtLeast: slog.LevelWarn}, "two"},
	} {
		t.Run(name, func(t *testing.T) {
			lines, err := f.Sandboxes.Logs(ctx, team, string(a.ID), give.req)
			var got []string
			for _, l := range lines {
				got = append(got, l.Line)
			}
			if err != nil || strings.Join(got, " ") != give.enqueueDial {
				t.Errorf("Logs = %v, %v; want %s", got, err, give.enqueueDial)
			}
		})
	}
	_, err = f.Sandboxes.Logs(ctx, team, string(a.ID), sandboxes.LogRequest{Limit: 1001})
	wantKind(t, err, errs.ErrInvalid, "limit")
}

// TestAKeyOutlivesNotItsMaker: what a key with an end makes ends with it, or before.
func TestAKeyOutlivesNotItsMaker(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	end := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
	_, secret, err := f.Keys.Create(ctx, apikeys.Identity{Namespace: team}, apikeys.New{Description: "maker", ExpiresAt: &end})
	if err != nil {
		t.Fatal(err)
	}
	for generation := range 3 {
		identity, err := f.Keys.Authenticate(ctx, secret)
		if err != nil {
			t.Fatal(err)
		}
		later, sooner := end.Add(time.Second), end.Add(-time.Minute)
		wantKind(t, second2(f.Keys.Create(ctx, identity, apikeys.New{Description: "later", ExpiresAt: &later})), errs.ErrInvalid, "expiresAt: must not be later than "+end.Format(time.RFC3339))
		if k, _, err := f.Keys.Create(ctx, identity, apikeys.New{Description: "sooner", ExpiresAt: &sooner}); err != nil || !k.ExpiresAt.Equal(sooner) {
			t.Errorf("generation %d: sooner: %+v, %v", generation, k, err)
		}
		k, next, err := f.Keys.Create(ctx, identity, apikeys.New{Description: "child"})
		if err != nil || k.ExpiresAt == nil || !k.ExpiresAt.Equal(end) {
			t.Fatalf("generation %d: %+v, %v; want it to end at %s", generation, k, err, end)
		}
		secret = next
	}
	if list, err := f.Keys.List(ctx, team); err != nil || len(list) != 7 {
		t.Errorf("%d keys, %v; want 7: what was refused made none", len(list), err)
	}
}

// TestTemplateNamesWithUnderscores: a_b and a-b are two templates, and each is shown as it was called.
func TestTemplateNamesWithUnderscores(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	called := func(alias string) func(*extensions.SandboxTemplate) {
		return func(t *extensions.SandboxTemplate) {
			t.Spec.Barchan = &extensions.TemplateBarchanSpec{Aliases: []string{"plain-" + t.Name, alias}}
		}
	}
	for _, template := range []client.Object{
		fakecluster.Template(team, "a-b", "base"), fakecluster.Template(team, "a-b-x1", "base", called("a_b")), fakecluster.Pool(team, "p", "", "a-b-x1"),
	} {
		if err := f.cluster.Create(ctx, template); err != nil {
			t.Fatal(err)
		}
	}
	f.cluster.Fill(t, team, "p", 1)
	seen := map[string]bool{}
	for _, name := range []string{"a_b", "a-b", "a_b", "team-a/a_b", "a_b:default"} { // the first of them warm
		v := f.mustCreate(t, request(name))
		want := strings.TrimSuffix(strings.TrimPrefix(name, "team-a/"), ":default")
		if got, err := f.Templates.Get(ctx, team, name); err != nil || got.Name != want || got.Aliases[0] != want || got.ID != v.TemplateID {
			t.Errorf("%s: template %+v, %v", name, got, err)
		}
		f.wantCalled(t, v, want)
		seen[v.TemplateID] = true
	}
	if len(seen) != 2 {
		t.Errorf("%d templates, want 2", len(seen))
	}
	for name, want := range map[string]int{"a_b": 8, "a-b": 2, "a-b-x1": 8} {
		if page, err := f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team, Template: name}); err != nil || len(page.Items) != want {
			t.Errorf("%d sandboxes of %s, %v; want %d", len(page.Items), name, err, want)
		}
	}
}

// wantCalled fails unless a sandbox, its fork and its snapshot show a template by its name.
func (f fixture) wantCalled(t *testing.T, v sandboxes.Sandbox, want string) {
	t.Helper()
	if v.TemplateName != want {
		t.Errorf("a sandbox of %s shows %s", want, v.TemplateName)
	}
	fork, err := f.Creates.Fork(t.Context(), forkRequest(v, 1))
	if err != nil || fork[0].Err != nil || fork[0].Sandbox.TemplateName != want {
		t.Errorf("the fork of one of %s: %+v, %v", want, fork, err)
	}
	if snap := f.mustSnapshot(t, v, ""); !strings.HasPrefix(snap.ID, want+":") {
		t.Errorf("the snapshot of one of %s is called %s", want, snap.ID)
	}
}
