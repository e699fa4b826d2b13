package cache_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

// names returns what is sorted by name.
func names(all []*agents.Sandbox) []string {
	var out []string
	for i := range all {
		out = append(out, all[i].Name)
	}
	slices.Sort(out)
	return out
}

// where returns the names of those that a full scan finds.
func where(all []*agents.Sandbox, keep func(*agents.Sandbox) bool) []string {
	var out []*agents.Sandbox
	for i := range all {
		if keep(all[i]) {
			out = append(out, all[i])
		}
	}
	return names(out)
}

// random puts values of few on a sandbox, or none.
func random(r *rand.Rand, s *agents.Sandbox) {
	some := func(values ...string) string { return append(values, "")[r.IntN(len(values)+1)] }
	s.Labels, s.Annotations, s.OwnerReferences = map[string]string{}, map[string]string{}, nil
	for label, values := range map[string][]string{
		agents.LabelWarmPoolSandbox: {"p1", "p2"}, agents.LabelTemplateHash: {"r1", "r2"}, pool.LabelOrigin: {"p1", "p2"},
	} {
		if v := some(values...); v != "" {
			s.Labels[label] = v
		}
	}
	if v := some("k1", "k2"); v != "" {
		s.Annotations[pool.AnnotationIdempotencyKey] = v
	}
	if v := some("o1", "o2"); v != "" {
		yes := r.IntN(2) == 0
		s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "X", Name: "x", UID: types.UID(v), Controller: &yes}}
	}
}

// TestIndexesFindWhatAScanFinds changes random sandboxes and compares every list by index with
// a scan over all, for values that some have and for one that none has.
func TestIndexesFindWhatAScanFinds(t *testing.T) {
	c, _ := start(t)
	r := rand.New(rand.NewPCG(1, uint64(t.Name()[0])))
	for round := range 4 {
		for i := range 15 {
			s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s%d-%d", round, i)}}
			s.Spec.PodTemplate = template("", "x").Spec.PodTemplate
			random(r, s)
			if err := c.Live().Create(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		settle(t, c)
		all, err := c.Sandboxes(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		compare(t, c, all)
		for _, s := range all {
			s = s.DeepCopy()
			switch r.IntN(3) {
			case 0:
				random(r, s)
				err = c.Live().Update(t.Context(), s)
			case 1:
				err = c.Live().Delete(t.Context(), s)
			case 2:
				s.Status.NodeName = "n" + strconv.Itoa(r.IntN(2))
				err = c.Live().Status().Update(t.Context(), s)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	settle(t, c)
	all, err := c.Sandboxes(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	compare(t, c, all)
}

// settle returns once the cache has seen all that was written before: one kind's events come in
// order, so it waits for one more.
func settle(t *testing.T, c *cache.Cache) {
	t.Helper()
	last := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "last-"}}
	last.Spec.PodTemplate = template("", "x").Spec.PodTemplate
	if err := c.Live().Create(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	if _, err := c.WaitSandbox(t.Context(), client.ObjectKeyFromObject(last), there); err != nil {
		t.Fatal(err)
	}
}

func compare(t *testing.T, c *cache.Cache, all []*agents.Sandbox) {
	t.Helper()
	ctx := t.Context()
	check := func(what string, got []*agents.Sandbox, err error, keep func(*agents.Sandbox) bool) {
		t.Helper()
		if want := where(all, keep); err != nil || !slices.Equal(names(got), want) {
			t.Errorf("%s = %v, %v; a scan finds %v", what, names(got), err, want)
		}
	}
	for _, n := range []string{"1", "2", "3"} {
		p, own := types.UID("p"+n), "o"+n
		got, err := c.Members(ctx, p)
		check("Members", got, err, func(s *agents.Sandbox) bool { return pool.MemberOf(s) == p })
		got, err = c.ClaimedFrom(ctx, p)
		check("ClaimedFrom", got, err, func(s *agents.Sandbox) bool { return pool.OriginOf(s) == p })
		got, err = c.Owned(ctx, types.UID(own))
		check("Owned", got, err, func(s *agents.Sandbox) bool {
			ref := metav1.GetControllerOf(s)
			return ref != nil && string(ref.UID) == own
		})
		got, err = c.SandboxesByIdempotency(ctx, "default", "k"+n)
		check("SandboxesByIdempotency", got, err, func(s *agents.Sandbox) bool { return s.Annotations[pool.AnnotationIdempotencyKey] == "k"+n })
	}
	got, err := c.SandboxesByIdempotency(ctx, "other", "k1")
	check("SandboxesByIdempotency elsewhere", got, err, func(*agents.Sandbox) bool { return false })
}

// TestIndexValues calls every index function with an object with the value, one without, and
// one of another kind.
func TestIndexValues(t *testing.T) {
	yes := true
	full := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{
		UID:             "u",
		Labels:          map[string]string{agents.LabelWarmPoolSandbox: "p", agents.LabelTemplateHash: "r", pool.LabelOrigin: "q"},
		Annotations:     map[string]string{pool.AnnotationIdempotencyKey: "k"},
		OwnerReferences: []metav1.OwnerReference{{UID: "other"}, {UID: "o", Controller: &yes}},
	}}
	full.Status.NodeName = "n"
	full.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}}
	want := map[string]string{
		"barchan.owner": "o", "barchan.member": "p", "barchan.origin": "q", "barchan.idempotency": "k", "barchan.restore": "c",
	}
	got := cache.IndexValues(full)
	delete(got, "barchan.sandboxID")
	if !maps.Equal(got, want) {
		t.Errorf("values = %v, want %v", got, want)
	}
	got = cache.IndexValues(&agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{agents.LabelTemplateHash: "r"}}})
	delete(got, "barchan.sandboxID")
	if len(got) > 0 {
		t.Errorf("values of an empty sandbox = %v", got)
	}
	swp := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "a"}}
	swp.Spec.SandboxTemplateRef.Name = "t"
	if got := cache.IndexValues(swp); !maps.Equal(got, map[string]string{"barchan.poolTemplate": "a/t"}) {
		t.Errorf("values of a pool = %v", got)
	}
	claim := &extensions.SandboxClaim{}
	claim.Spec.WarmPoolRef.Name = "p"
	if got := cache.IndexValues(claim); !maps.Equal(got, map[string]string{"barchan.claimPool": "p"}) {
		t.Errorf("values of a claim = %v", got)
	}
}

// TestIndexValuesOfCheckpoints checks the checkpoints by which a sandbox and a template are indexed.
func TestIndexValuesOfCheckpoints(t *testing.T) {
	c := &barchan.Checkpoint{Spec: barchan.CheckpointSpec{SandboxName: "s"}}
	if got := cache.IndexValues(c); !maps.Equal(got, map[string]string{"barchan.unfinished": "s"}) {
		t.Errorf("values of a new one = %v", got)
	}
	for _, phase := range []barchan.CheckpointPhase{barchan.CheckpointReady, barchan.CheckpointFailed} {
		c.Status.Phase = phase
		if got := cache.IndexValues(c); len(got) > 0 {
			t.Errorf("values of one that is %s = %v", phase, got)
		}
	}
	imported := &barchan.Checkpoint{Spec: barchan.CheckpointSpec{SandboxName: "s", Origin: barchan.OriginImport}}
	if got := cache.IndexValues(imported); len(got) > 0 {
		t.Errorf("values of an import = %v", got)
	}
	of := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "t"}}
	if got := cache.IndexValues(pool.NewWarmCheckpoint(of, "r", "b", nil)); got["barchan.warm"] != "a/t" || len(got) != 2 {
		t.Errorf("values of a warm-up's = %v", got)
	}
	of.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}}}
	if got := cache.IndexValues(of); got["barchan.templateOrigin"] != "c" || len(got) != 2 {
		t.Errorf("values of a template = %v", got)
	}
}

// TestTemplatesNamed: by a name, an alias and an ID, of one namespace.
func TestTemplatesNamed(t *testing.T) {
	c, _ := start(t)
	made := template("one", "x")
	made.Spec.Barchan = &extensions.TemplateBarchanSpec{Aliases: []string{"uno", "team_one"}}
	for _, o := range []*extensions.SandboxTemplate{made, template("two", "x")} {
		if err := c.Live().Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	is := func(o *extensions.SandboxTemplate) (bool, error) { return o != nil, nil }
	if _, err := cache.Wait(t.Context(), c, types.NamespacedName{Namespace: "default", Name: "two"}, is); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"one": "one", "uno": "one", "team_one": "one", pool.TemplateID(made): "one", "two": "two", "three": "", "": ""} {
		got, err := c.TemplatesNamed(t.Context(), "default", name)
		if err != nil || (want == "") != (len(got) == 0) || want != "" && got[0].Name != want {
			t.Errorf("%q is %v, %v; want %q", name, got, err, want)
		}
		if got, err := c.TemplatesNamed(t.Context(), "other", name); err != nil || len(got) > 0 {
			t.Errorf("%q in another namespace is %v, %v", name, got, err)
		}
	}
}
