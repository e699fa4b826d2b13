package manager

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func (f fixture) mustSnapshot(t *testing.T, v sandboxes.Sandbox, name string) snapshots.Snapshot {
	t.Helper()
	s, err := f.Snapshots.Create(t.Context(), snapshots.Request{Namespace: team, ID: string(v.ID), Name: name})
	if err != nil {
		t.Fatalf("Snapshot: %v", err)
	}
	return s
}

// imaged requests a sandbox of an image that means something to the stand-in.
func (f fixture) imaged(t *testing.T, image string) creating.Request {
	t.Helper()
	if err := f.cluster.Create(t.Context(), fakecluster.Template(team, image, image)); err != nil {
		t.Fatal(err)
	}
	return request(image)
}

// checkpoint reads the object behind a snapshot.
func (f fixture) checkpoint(t *testing.T, name string) *barchan.Checkpoint {
	t.Helper()
	c := &barchan.Checkpoint{}
	if err := f.cluster.Get(t.Context(), client.ObjectKey{Namespace: team, Name: name}, c); err != nil {
		t.Fatal(err)
	}
	return c
}

// ids are what a list shows.
func (f fixture) ids(t *testing.T, req snapshots.ListRequest) (ids []string) {
	t.Helper()
	req.Namespace = team
	page, _, err := f.Snapshots.List(t.Context(), req)
	if err != nil {
		t.Fatalf("Snapshots(%+v): %v", req, err)
	}
	for _, s := range page {
		ids = append(ids, s.ID)
	}
	return ids
}

func TestSnapshot(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("sized"))
	got := f.mustSnapshot(t, v, "mine:v1")
	want := snapshots.Snapshot{
		ID: "mine:v1", Names: []string{"team-a/mine:v1"}, Namespace: team, Object: "mine-v1", SandboxID: v.ID, TemplateID: v.TemplateID, TemplateName: "sized",
		Content: barchan.ContentMemoryAndFiles, Size: 3 << 20, MemorySize: 2 << 20, CreatedAt: got.CreatedAt,
	}
	if fmt.Sprint(got) != fmt.Sprint(want) || time.Since(got.CreatedAt) > time.Minute {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	c := f.checkpoint(t, "mine-v1")
	if !c.Spec.KeepRunning || c.Spec.TTLSeconds != nil || c.Spec.SandboxName != v.Name || fmt.Sprint(c.Finalizers) != "["+barchan.NodeFinalizer+"]" {
		t.Errorf("the checkpoint is %+v of %v", c.Spec, c.Finalizers)
	}
	f.wantUntouched(t, v)
}

// wantUntouched fails unless a sandbox keeps running until its previous end.
func (f fixture) wantUntouched(t *testing.T, v sandboxes.Sandbox) {
	t.Helper()
	if now, err := f.Sandboxes.Get(t.Context(), team, string(v.ID)); err != nil || now.State != sandboxes.StateRunning || !now.EndAt.Equal(v.EndAt) {
		t.Errorf("the source is %+v, %v", now, err)
	}
}

func TestSnapshotOfOneThatSleeps(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("sized"))
	if err := f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil); err != nil {
		t.Fatal(err)
	}
	got, err := f.Snapshots.Create(t.Context(), snapshots.Request{Namespace: team, ID: string(v.ID), FilesOnly: true, TTL: time.Hour})
	if err != nil || got.Content != barchan.ContentFiles || got.MemorySize != 0 || !strings.HasPrefix(got.ID, "sized:") {
		t.Errorf("of a paused one: %+v, %v", got, err)
	}
	if now, err := f.Sandboxes.Get(t.Context(), team, string(v.ID)); err != nil || now.State != sandboxes.StatePaused {
		t.Errorf("the source is %+v, %v", now, err)
	}
	if left := time.Until(got.ExpiresAt); left < 59*time.Minute || left > time.Hour {
		t.Errorf("expires in %s, want an hour", left)
	}
}

func TestSnapshotRefuses(t *testing.T) {
	f := newFixture(t)
	v, theirs := f.mustCreate(t, request("base")), f.mustCreate(t, creating.Request{Namespace: "team-b", Template: "base", Timeout: time.Hour})
	f.mustSnapshot(t, v, "taken:once")
	broken := f.mustCreate(t, f.imaged(t, fakecluster.ImageUncapturable))
	id := string(v.ID)
	for name, give := range map[string]struct {
		req  snapshots.Request
		kind error
		text string
	}{
		"no sandbox":    {snapshots.Request{ID: "nonsense"}, errs.ErrNotFound, `Sandbox "nonsense" doesn't exist`},
		"another's":     {snapshots.Request{ID: string(theirs.ID)}, errs.ErrNotFound, "doesn't exist"},
		"name":          {snapshots.Request{ID: id, Name: "My_Snap"}, errs.ErrInvalid, `name: "My_Snap"`},
		"long name":     {snapshots.Request{ID: id, Name: strings.Repeat("a", 64)}, errs.ErrInvalid, "name: "},
		"dash":          {snapshots.Request{ID: id, Name: "a-"}, errs.ErrInvalid, "name: "},
		"no name":       {snapshots.Request{ID: id, Name: ":v1"}, errs.ErrInvalid, "name: "},
		"tag":           {snapshots.Request{ID: id, Name: "a:B"}, errs.ErrInvalid, `name: the tag "B"`},
		"empty tag":     {snapshots.Request{ID: id, Name: "a:"}, errs.ErrInvalid, `name: the tag ""`},
		"odd tag":       {snapshots.Request{ID: id, Name: "a:b..c"}, errs.ErrInvalid, "name: the tag"},
		"other team":    {snapshots.Request{ID: id, Name: "team-b/a"}, errs.ErrInvalid, `name: "team-b" is not your team`},
		"taken":         {snapshots.Request{ID: id, Name: "taken:once"}, errs.ErrConflict, `name: a snapshot "taken:once" exists`},
		"short ttl":     {snapshots.Request{ID: id, TTL: time.Millisecond}, errs.ErrInvalid, "ttl: must be 1 second"},
		"negative ttl":  {snapshots.Request{ID: id, TTL: -time.Hour}, errs.ErrInvalid, "ttl: must be 1 second"},
		"what went bad": {snapshots.Request{ID: string(broken.ID), Name: "bad"}, errs.ErrConflict, "cannot be captured: the disk is full"},
	} {
		t.Run(name, func(t *testing.T) {
			give.req.Namespace = team
			_, err := f.Snapshots.Create(t.Context(), give.req)
			wantKind(t, err, give.kind, give.text)
		})
	}
	await(t, func() bool { // what failed is not left behind
		left, err := f.cluster.Checkpoints(t.Context(), "")
		return err == nil && len(left) == 1
	})
}

func TestSnapshotThatIsSlow(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.CaptureTimeout = 20 * time.Millisecond })
	v := f.mustCreate(t, request("base"))
	f.cluster.Hold(true)
	_, err := f.Snapshots.Create(t.Context(), snapshots.Request{Namespace: team, ID: string(v.ID), Name: "slow:a"})
	wantKind(t, err, errs.ErrTimeout, "not ready within 20ms; it is listed when it is")
	if ids := f.ids(t, snapshots.ListRequest{}); len(ids) != 0 {
		t.Errorf("listed before they are ready: %v", ids)
	}
	f.cluster.Hold(false)
	await(t, func() bool { return fmt.Sprint(f.ids(t, snapshots.ListRequest{})) == "[slow:a]" })
}

func TestSnapshotsLists(t *testing.T) {
	f := newFixture(t)
	a, b := f.mustCreate(t, request("base")), f.mustCreate(t, request("base"))
	for _, name := range []string{"x:1", "x:2", "y:1"} {
		f.mustSnapshot(t, a, name)
	}
	f.mustSnapshot(t, b, "x:3")
	for _, purpose := range []string{barchan.PurposeFork, barchan.PurposeWarm} {
		c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: purpose, Labels: map[string]string{barchan.LabelPurpose: purpose}}}
		c.Spec.SandboxName = a.Name
		if err := f.cluster.Create(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		await(t, func() bool { return f.checkpoint(t, purpose).Status.Phase == barchan.CheckpointReady })
	}
	byHand := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "by.hand"}, Spec: barchan.CheckpointSpec{SandboxName: a.Name}}
	if err := f.cluster.Create(t.Context(), byHand); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return len(f.ids(t, snapshots.ListRequest{})) == 5 })
	for name, give := range map[string]struct {
		req         snapshots.ListRequest
		enqueueDial string
	}{
		"of a sandbox":      {snapshots.ListRequest{SandboxID: string(b.ID)}, "[x:3]"},
		"with a client ID":  {snapshots.ListRequest{SandboxID: string(b.ID) + "-client"}, "[x:3]"},
		"of a name":         {snapshots.ListRequest{Name: "y"}, "[y:1]"},
		"of a tag":          {snapshots.ListRequest{Name: "x:2"}, "[x:2]"},
		"of the team":       {snapshots.ListRequest{Name: "team-a/x:2"}, "[x:2]"},
		"of another team":   {snapshots.ListRequest{Name: "team-b/x:2"}, "[]"},
		"of nothing":        {snapshots.ListRequest{Name: "z"}, "[]"},
		"of a sandbox gone": {snapshots.ListRequest{SandboxID: "i" + strings.Repeat("0", 19)}, "[]"},
		"made by hand":      {snapshots.ListRequest{Name: "by.hand"}, "[by.hand:default]"},
	} {
		if got := fmt.Sprint(f.ids(t, give.req)); got != give.enqueueDial {
			t.Errorf("%s: %s, want %s", name, got, give.enqueueDial)
		}
	}
	seen, cursor := map[string]int{}, ""
	for range 3 {
		page, next, err := f.Snapshots.List(t.Context(), snapshots.ListRequest{Namespace: team, Limit: 2, Cursor: cursor})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page {
			seen[s.ID]++
		}
		cursor = next
	}
	if len(seen) != 5 || cursor != "" {
		t.Errorf("pages show %v, and then %q", seen, cursor)
	}
	wantKind(t, second2(f.Snapshots.List(t.Context(), snapshots.ListRequest{Namespace: team, SandboxID: "x"})), errs.ErrInvalid, "sandboxID")
	wantKind(t, second2(f.Snapshots.List(t.Context(), snapshots.ListRequest{Namespace: team, Limit: 1001})), errs.ErrInvalid, "limit")
	if page, _, err := f.Snapshots.List(t.Context(), snapshots.ListRequest{Namespace: "team-b"}); err != nil || len(page) != 0 {
		t.Errorf("another team sees %v, %v", page, err)
	}
}

func TestDeleteSnapshot(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	one, two := f.mustSnapshot(t, v, "x:1"), f.mustSnapshot(t, v, "x:2")
	ctx := t.Context()
	wantKind(t, f.Snapshots.Delete(ctx, "team-b", one.ID), errs.ErrNotFound, "snapshot 'x:1' not found")
	wantKind(t, f.Snapshots.Delete(ctx, team, "x"), errs.ErrConflict, "there are 2 snapshots")
	if err := f.Snapshots.Delete(ctx, team, one.Names[0]); err != nil {
		t.Errorf("Delete = %v", err)
	}
	wantKind(t, f.Snapshots.Delete(ctx, team, one.ID), errs.ErrNotFound, "")
	f.cluster.Hold(true) // what is on its way out is gone
	if err := f.Snapshots.Delete(ctx, team, "x"); err != nil {
		t.Errorf("Delete by a bare name = %v", err)
	}
	wantKind(t, f.Snapshots.Delete(ctx, team, two.ID), errs.ErrNotFound, "")
	_, err := f.Creates.Create(ctx, request(two.ID))
	wantKind(t, err, errs.ErrNotFound, "template 'x:2' not found")
	if len(f.ids(t, snapshots.ListRequest{})) != 0 || f.checkpoint(t, two.Object).DeletionTimestamp == nil {
		t.Error("a deleted snapshot is listed, or went before its node let it go")
	}
	f.cluster.Hold(false)
}

// TestSnapshotOfAnotherReplica is read before the cache has it.
func TestSnapshotOfAnotherReplica(t *testing.T) {
	f := newFixture(t)
	made := f.mustSnapshot(t, f.mustCreate(t, request("base")), "fresh:1")
	other := f.replica(t, func(c *Config) { c.Cache = blind{f.cluster} })
	if got, err := other.Snapshots.Find(t.Context(), team, made.ID); err != nil || got.Name != made.Object {
		t.Errorf("Find = %+v, %v", got, err)
	}
	_, err := other.Snapshots.Find(t.Context(), "team-b", made.ID)
	wantKind(t, err, errs.ErrNotFound, "")
}

// blind is a cache that has no checkpoint yet.
type blind struct{ Cache }

func (blind) Checkpoints(context.Context, string) ([]barchan.Checkpoint, error) { return nil, nil }

func TestCreateFromASnapshot(t *testing.T) {
	f := newFixture(t)
	req := request("sized")
	req.OnTimeout, req.Network = agents.TimeoutPause, &agents.EgressPolicy{DenyOut: []string{"1.1.1.1"}}
	source := f.mustCreate(t, req)
	snap := f.mustSnapshot(t, source, "mine:v1")
	if err := f.Sandboxes.Kill(t.Context(), team, string(source.ID)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{snap.ID, snap.Names[0], "mine", "mine:default", "mine:latest", "team-a/mine"} {
		again := request(id)
		again.Metadata, again.Env = map[string]string{"mine": "yes"}, map[string]string{"NEW": "1"}
		v := f.mustCreate(t, again)
		s := f.object(t, v)
		b := s.Spec.Barchan
		for name, pair := range map[string][2]any{
			"restore":   {*b.Restore, agents.RestoreSource{CheckpointName: "mine-v1"}},
			"template":  {[]string{v.TemplateID, v.TemplateName}, []string{source.TemplateID, "sized"}},
			"namespace": {s.Annotations[pool.AnnotationTemplateNamespace], team},
			"revision":  {s.Labels[agents.LabelTemplateHash], ""},
			"env":       {s.Spec.PodTemplate.Spec.Containers[0].Env, []corev1.EnvVar{{Name: "A", Value: "template"}, {Name: "B", Value: "template"}, {Name: "NEW", Value: "1"}}},
			"memory":    {v.Size.MemoryMB, 512},
			"metadata":  {b.Metadata, map[string]string{"mine": "yes"}},
			"timeout":   {b.OnTimeout, agents.TimeoutPause},
			"network":   {b.Network.DenyOut, []string{"1.1.1.1"}},
			"bound":     {s.Annotations[pool.AnnotationBoundEnv], "true"},
			"other":     {v.ID != source.ID && v.AgentToken != source.AgentToken, true},
		} {
			if fmt.Sprint(pair[0]) != fmt.Sprint(pair[1]) {
				t.Errorf("%s: %s: got %v, want %v", id, name, pair[0], pair[1])
			}
		}
		f.wantReachable(t, v.ID, true)
	}
	files := request(snap.ID)
	files.FilesOnly = true
	if s := f.object(t, f.mustCreate(t, files)); !s.Spec.Barchan.Restore.FilesOnly {
		t.Error("not from its files only")
	}
	for _, id := range []string{"mine:v2", "team-b/mine:v1", "unknown"} {
		_, err := f.Creates.Create(t.Context(), request(id))
		wantKind(t, err, errs.ErrNotFound, "template '"+id+"' not found")
	}
}

func TestTemplatesWinOverSnapshots(t *testing.T) {
	f := newFixture(t)
	snap := f.mustSnapshot(t, f.mustCreate(t, request("base")), "base")
	if s := f.object(t, f.mustCreate(t, request("base"))); s.Spec.Barchan.Restore != nil {
		t.Errorf("from %+v, want the template", s.Spec.Barchan.Restore)
	}
	if s := f.object(t, f.mustCreate(t, request(snap.ID))); s.Spec.Barchan.Restore == nil {
		t.Error("by its ID: from the template")
	}
}

func TestTheNewestOfAName(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	f.mustSnapshot(t, v, "x")
	want := f.mustSnapshot(t, v, "x")
	f.cluster.Hold(true) // a newer one that is not ready
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "x-zzz", Labels: map[string]string{barchan.LabelSnapshot: "x", barchan.LabelTag: "zzz"}}}
	if err := f.cluster.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Snapshots.Find(t.Context(), team, "x"); err != nil || got.SnapshotID() != want.ID {
		t.Errorf("got %s, %v; want %s", got.Name, err, want.ID)
	}
	f.cluster.Hold(false)
}

func TestSnapshotAndCreateOnce(t *testing.T) {
	f := newFixture(t)
	snap := f.mustSnapshot(t, f.mustCreate(t, request("base")), "x")
	req := request(snap.ID)
	req.IdempotencyKey = "once"
	one, two := f.mustCreate(t, req), f.mustCreate(t, req)
	if one.ID != two.ID {
		t.Errorf("two sandboxes, %s and %s, of one request", one.ID, two.ID)
	}
	req.FilesOnly = true
	_, err := f.Creates.Create(t.Context(), req)
	wantKind(t, err, idempotency.ErrKeyReused, "different request")
}

func TestSecretsOfASnapshot(t *testing.T) {
	f := newFixture(t)
	with := request("base")
	with.Env = map[string]string{"TOKEN": "s3cret"}
	v := f.mustCreate(t, with)
	own := f.mustSnapshot(t, v, "own")
	if !own.Secrets {
		t.Fatal("a snapshot of a sandbox with variables of its own reports none")
	}
	if s := f.object(t, f.mustCreate(t, request(own.ID))); !pool.OwnEnv(s) || !pool.AllowsSecrets(s) {
		t.Errorf("from variables of its own: marked %v", s.Annotations)
	}
	_, err := f.Creates.Create(t.Context(), creating.Request{Namespace: "team-b", Template: team + "/" + own.ID, Timeout: time.Hour})
	wantKind(t, err, errs.ErrNotFound, "not found")

	f.edit(t, v, func(s *agents.Sandbox) { pool.BindEnv(s, false) }) // as a SandboxClaim does
	snap := f.mustSnapshot(t, v, "x")
	_, err = f.Creates.Create(t.Context(), request(snap.ID))
	wantKind(t, err, errs.ErrForbidden, "allow it by allowSecrets")
	allowed := request(snap.ID)
	allowed.AllowSecrets, allowed.Env = true, map[string]string{"MORE": "1"}
	again := f.mustCreate(t, allowed)
	if got := f.object(t, again); !pool.BoundEnv(got) || pool.OwnEnv(got) || got.Annotations[pool.AnnotationAllowSecrets] != "true" {
		t.Error("what holds secrets now, with leave, is not marked")
	}
	_, err = f.Creates.Fork(t.Context(), forkRequest(again, 1))
	wantKind(t, err, errs.ErrForbidden, "allow it by allowSecrets")

	free := f.replica(t, func(c *Config) { c.ForkSecrets = true })
	if _, err := free.Creates.Create(t.Context(), request(snap.ID)); err != nil {
		t.Errorf("where the server allows it: %v", err)
	}
	f.edit(t, v, func(s *agents.Sandbox) { s.Spec.Barchan.Fork = &agents.ForkPolicy{Secrets: agents.SecretsAllow} })
	if _, err := f.Creates.Create(t.Context(), request(f.mustSnapshot(t, v, "y").ID)); err != nil {
		t.Errorf("where the source allows it: %v", err)
	}
}

// TestSnapshotNamesWithUnderscores are other names than those with dashes.
func TestSnapshotNamesWithUnderscores(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ids := map[string]string{}
	for _, name := range []string{"a_b:1", "a-b:1", "a_b_c:1", "a_b-c:1", "a-b_c:1"} {
		snap := f.mustSnapshot(t, v, name)
		if snap.ID != name || ids[snap.Object] != "" || len(validation.IsDNS1123Subdomain(snap.Object)) > 0 {
			t.Errorf("snapshot %s is %s, object %s (also of %q)", name, snap.ID, snap.Object, ids[snap.Object])
		}
		ids[snap.Object] = name
		if s := f.object(t, f.mustCreate(t, request(name))); s.Spec.Barchan.Restore.CheckpointName != snap.Object {
			t.Errorf("a create from %s starts from %s", name, s.Spec.Barchan.Restore.CheckpointName)
		}
		other := f.replica(t, func(c *Config) { c.Cache = blind{f.cluster} })
		if got, err := other.Snapshots.Find(t.Context(), team, name); err != nil || got.Name != snap.Object {
			t.Errorf("before the cache knows of %s: %+v, %v", name, got, err)
		}
	}
	if err := f.Snapshots.Delete(t.Context(), team, "a_b:1"); err != nil {
		t.Error(err)
	}
	if _, err := f.Snapshots.Find(t.Context(), team, "a-b:1"); err != nil {
		t.Errorf("the deletion of a_b took a-b: %v", err)
	}
}

// TestTemplateOfACheckpointWithSecrets: the author of the template must have allowed it, and a create reports
// so at once and leaves nothing.
func TestTemplateOfACheckpointWithSecrets(t *testing.T) {
	f := newFixture(t)
	with := request("base")
	with.Env = map[string]string{"TOKEN": "s3cret"}
	snap := f.mustSnapshot(t, f.mustCreate(t, with), "x")
	origin := func(policy *agents.ForkPolicy) {
		t.Helper()
		t1, err := f.cluster.Template(t.Context(), client.ObjectKey{Namespace: team, Name: "sized"})
		if err != nil {
			t.Fatal(err)
		}
		t1.Spec.Barchan.Sandbox.Restore, t1.Spec.Barchan.Sandbox.Fork = &agents.RestoreSource{CheckpointName: snap.Object}, policy
		if err := f.cluster.Update(t.Context(), t1); err != nil {
			t.Fatal(err)
		}
	}
	before := len(f.sandboxes(t))
	origin(nil)
	for _, env := range []map[string]string{nil, {"MORE": "x"}} {
		req := request("sized")
		req.Env = env
		_, err := f.Creates.Create(t.Context(), req)
		wantKind(t, err, errs.ErrForbidden, "its checkpoint holds secrets")
	}
	await(t, func() bool { return len(f.sandboxes(t)) == before })
	origin(&agents.ForkPolicy{Secrets: agents.SecretsAllow})
	f.mustCreate(t, request("sized"))
}

func TestWarmClaimsWithVariablesAreMarked(t *testing.T) {
	f := newFixture(t)
	f.cluster.Fill(t, team, "base", 2)
	with := request("base")
	with.Env = map[string]string{"A": "b"}
	if s := f.object(t, f.mustCreate(t, with)); !pool.BoundEnv(s) || s.Labels[agents.LabelLaunchType] != agents.LaunchWarm {
		t.Errorf("annotations %v of a %s start", s.Annotations, s.Labels[agents.LabelLaunchType])
	}
	if s := f.object(t, f.mustCreate(t, request("base"))); pool.BoundEnv(s) {
		t.Error("marked, though it brought nothing")
	}
}

func TestSnapshotThatSaysNothing(t *testing.T) {
	f := newFixture(t)
	snap := f.mustSnapshot(t, f.mustCreate(t, request("base")), "x:1")
	c := f.checkpoint(t, snap.Object)
	c.Status.Source.Blueprint.Raw = nil
	if err := f.cluster.Status().Update(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	_, err := f.Creates.Create(t.Context(), request(snap.ID))
	wantKind(t, err, errs.ErrConflict, "has no blueprint of its sandbox")
	c = f.checkpoint(t, snap.Object)
	c.Status.Phase = barchan.CheckpointFailed
	if err := f.cluster.Status().Update(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	_, err = f.Creates.Create(t.Context(), request(snap.ID))
	wantKind(t, err, errs.ErrConflict, "cannot be captured")
}

// TestColdStartsSkipTheWarmUp where a checkpoint of it is ready.
func TestColdStartsSkipTheWarmUp(t *testing.T) {
	f := newFixture(t)
	t1, err := f.cluster.Template(t.Context(), client.ObjectKey{Namespace: team, Name: "sized"})
	if err != nil {
		t.Fatal(err)
	}
	t1.Spec.Barchan.Sandbox.WarmUp = &agents.WarmUp{Command: []string{"python3", "-c", "pass"}}
	if err := f.cluster.Update(t.Context(), t1); err != nil {
		t.Fatal(err)
	}
	if s := f.object(t, f.mustCreate(t, request("sized"))); s.Spec.Barchan.Restore != nil || s.Spec.Barchan.WarmUp == nil {
		t.Errorf("before there is one: %+v", s.Spec.Barchan)
	}
	seed := pool.NewSeed(t1, f.revision(t), team, nil)
	warm := pool.NewWarmCheckpoint(t1, f.revision(t), team, nil)
	for _, obj := range []client.Object{seed, warm} {
		if err := f.cluster.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	await(t, func() bool { return f.checkpoint(t, warm.Name).Status.Phase == barchan.CheckpointReady })
	if s := f.object(t, f.mustCreate(t, request("sized"))); s.Spec.Barchan.Restore == nil || s.Spec.Barchan.Restore.CheckpointName != warm.Name {
		t.Errorf("when there is one: %+v", s.Spec.Barchan)
	}
}

// TestOneSnapshotID: the object shows the ID that the API gives, those of the server's own use have none.
func TestOneSnapshotID(t *testing.T) {
	f := newFixture(t)
	snap := f.mustSnapshot(t, f.mustCreate(t, request("base")), "mine:v1")
	c := f.checkpoint(t, snap.Object)
	if c.Status.SnapshotID != snap.ID || snap.ID != "mine:v1" {
		t.Errorf("the API returned %q, the object %q", snap.ID, c.Status.SnapshotID)
	}
	c.Labels = map[string]string{barchan.LabelPurpose: barchan.PurposeFork}
	if id := c.SnapshotID(); id != "" {
		t.Errorf("a checkpoint for forks has the ID %q", id)
	}
	c.Labels = nil
	if id, want := c.SnapshotID(), snap.Object+":default"; id != want {
		t.Errorf("one without labels has the ID %q, want %q", id, want)
	}
}
