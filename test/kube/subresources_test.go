package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// TestSubresourcesAgree: scale, status, tables and conditional writes are alike on both servers.
func TestSubresourcesAgree(t *testing.T) {
	embedded, kube := both(t)
	for name, on := range map[string]func(*testing.T, server) []string{
		"scale": scales, "status": statuses, "tables": tables, "versions": versions, "secrecy": secrecy,
	} {
		t.Run(name, func(t *testing.T) {
			a, b := on(t, embedded), on(t, kube)
			if len(a) == 0 || !slices.Equal(a, b) {
				t.Errorf("embedded:\n  %s\nreal:\n  %s", strings.Join(a, "\n  "), strings.Join(b, "\n  "))
			}
		})
	}
}

// make creates a valid object of a kind.
func (s server) make(t *testing.T, kind, name, changes string) client.Object {
	t.Helper()
	k := kinds()[kind]
	o := k.object(t, name, changes)
	if err := s.Create(t.Context(), o); err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	typed := k.typed()
	if err := s.Get(t.Context(), client.ObjectKeyFromObject(o), typed); err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	return typed
}

// scales reports what a pool's scale returns and accepts.
func scales(t *testing.T, s server) (out []string) {
	ctx := t.Context()
	pool := s.make(t, "SandboxWarmPool", "scaled", "spec: {replicas: 3}").(*extensions.SandboxWarmPool)
	pool.Status.Replicas, pool.Status.Selector = 2, "a=b"
	if err := s.Status().Update(ctx, pool); err != nil {
		t.Fatal(err)
	}
	for _, replicas := range []int32{0, 7, 1000, 1001, -1} {
		scale := &autoscalingv1.Scale{}
		if err := s.SubResource("scale").Get(ctx, pool, scale); err != nil {
			t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s %s: %+v %+v", scale.Kind, scale.Name, scale.Spec, scale.Status))
		scale.Spec.Replicas = replicas
		err := s.SubResource("scale").Update(ctx, pool, client.WithSubResourceBody(scale))
		out = append(out, fmt.Sprintf("to %d: refused %v, as invalid %v", replicas, err != nil, apierrors.IsInvalid(err)))
	}
	if err := s.Get(ctx, client.ObjectKeyFromObject(pool), pool); err != nil {
		t.Fatal(err)
	}
	return append(out, fmt.Sprintf("replicas %d at generation %d", *pool.Spec.Replicas, pool.Generation))
}

// statuses reports which fields an update of the object changes, and one of its status.
func statuses(t *testing.T, s server) (out []string) {
	ctx := t.Context()
	box := s.make(t, "Sandbox", "doors", "{status: {nodeName: forged}}").(*agents.Sandbox)
	record := func(when string) {
		t.Helper()
		if err := s.Get(ctx, client.ObjectKeyFromObject(box), box); err != nil {
			t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s: node %q, %s, labels %v, generation %d", when, box.Status.NodeName, box.Spec.OperatingMode, box.Labels, box.Generation))
	}
	record("created")
	forge := func(node string) {
		box.Status.NodeName, box.Spec.OperatingMode, box.Labels = node, agents.ModeSuspended, map[string]string{"from": node}
	}
	forge("status")
	if err := s.Status().Update(ctx, box); err != nil {
		t.Fatal(err)
	}
	record("status updated")
	forge("object")
	if err := s.Update(ctx, box); err != nil {
		t.Fatal(err)
	}
	record("object updated")
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"from":"patch"}},"spec":{"operatingMode":"Running"},"status":{"nodeName":"patch"}}`))
	if err := s.Status().Patch(ctx, box, patch); err != nil {
		t.Fatal(err)
	}
	record("status patched")
	return out
}

// versions reports which writes with an old version are accepted.
func versions(t *testing.T, s server) (out []string) {
	ctx := t.Context()
	box := s.make(t, "Sandbox", "versions", "{}").(*agents.Sandbox)
	stale := box.DeepCopy()
	box.Labels = map[string]string{"seen": "no"}
	if err := s.Update(ctx, box); err != nil {
		t.Fatal(err)
	}
	for _, try := range []struct {
		name  string
		write func() error
	}{
		{"an old version", func() error { return s.Update(ctx, stale.DeepCopy()) }},
		{"an old version's status", func() error { return s.Status().Update(ctx, stale.DeepCopy()) }},
		{"deletion of an old version", func() error {
			return s.Delete(ctx, stale, client.Preconditions{ResourceVersion: &stale.ResourceVersion})
		}},
		{"deletion of another's namesake", func() error {
			uid := types.UID("other")
			return s.Delete(ctx, stale, client.Preconditions{UID: &uid})
		}},
		{"no version", func() error {
			o := stale.DeepCopy()
			o.ResourceVersion = ""
			return s.Update(ctx, o)
		}},
		{"a namesake", func() error {
			return s.Create(ctx, kinds()["Sandbox"].object(t, "versions", "{}"))
		}},
		{"a namespace that is not there", func() error {
			o := kinds()["Sandbox"].object(t, "versions", "{}")
			o.SetNamespace("nowhere")
			return s.Create(ctx, o)
		}},
	} {
		out = append(out, fmt.Sprintf("%s: %s", try.name, apierrors.ReasonForError(try.write())))
	}
	return out
}

// secrecy reports whether a refusal repeats what may be a key.
func secrecy(t *testing.T, s server) (out []string) {
	for _, key := range []string{"barchan_secret", strings.Repeat("barchan_secret", 10)} {
		err := s.Create(t.Context(), kinds()["APIKey"].object(t, "secrecy", "spec: {sha256: "+key+"}"))
		if !apierrors.IsInvalid(err) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want a refusal that does not repeat the key", s.name, err)
		}
		out = append(out, string(apierrors.ReasonForError(err)))
	}
	return out
}

// tables returns what `kubectl get` prints of each kind.
func tables(t *testing.T, s server) (out []string) {
	ready := []metav1.Condition{
		{Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: "Because", LastTransitionTime: metav1.NewTime(time.Now())},
		{Type: extensions.PoolProgressing, Status: metav1.ConditionFalse, Reason: "Full", LastTransitionTime: metav1.NewTime(time.Now())},
	}
	box := s.make(t, "Sandbox", "shown", "{}").(*agents.Sandbox)
	box.Status.Conditions = ready
	pool := s.make(t, "SandboxWarmPool", "shown", "{}").(*extensions.SandboxWarmPool)
	pool.Status.Conditions, pool.Status.ReadyReplicas, pool.Status.CurrentRevision = ready, 2, revision
	claim := s.make(t, "SandboxClaim", "shown", "{}").(*extensions.SandboxClaim)
	claim.Status.Conditions, claim.Status.Sandbox.Name = ready, "shown"
	checkpoint := s.make(t, "Checkpoint", "shown", "{}").(*barchan.Checkpoint)
	checkpoint.Status.Phase = "Ready"
	build := s.make(t, "TemplateBuild", "shown", "{}").(*barchan.TemplateBuild)
	build.Status.Phase, build.Status.Step, build.Status.CachedSteps = barchan.BuildBuilding, 2, 1
	for _, o := range []client.Object{box, pool, claim, checkpoint, build} {
		if err := s.Status().Update(t.Context(), o); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
	}
	s.make(t, "SandboxTemplate", "shown", "{}")
	s.make(t, "APIKey", "shown", "spec: {description: mine, prefix: p, expiresAt: '2030-01-02T03:04:05Z'}")
	s.make(t, "TemplateRevision", "shown", "{}")
	if err := s.Create(t.Context(), &barchan.Volume{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "shown"}}); err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	// Nothing is known of these yet.
	s.make(t, "Sandbox", "unknown", "{}")
	s.make(t, "SandboxClaim", "unknown", "{}")
	s.make(t, "Checkpoint", "unknown", "{}")
	s.make(t, "TemplateBuild", "unknown", "{}")
	for _, crd := range readCRDs(t) {
		out = append(out, s.table(t, fmt.Sprintf("/apis/%s/%s/namespaces/default/%s", crd.Spec.Group, crd.Spec.Versions[0].Name, crd.Spec.Names.Plural))...)
	}
	return out
}

// table is a list as a table, without the ages and what other tests made.
func (s server) table(t *testing.T, path string) (out []string) {
	t.Helper()
	c, err := rest.HTTPClientFor(s.config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdleConnections()
	host, _, err := rest.DefaultServerUrlFor(s.config)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, host.JoinPath(path).String(), http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var table metav1.Table
	if err := json.NewDecoder(resp.Body).Decode(&table); err != nil || table.Kind != "Table" {
		t.Fatalf("%s: GET %s: %s, %q, %v", s.name, path, resp.Status, table.Kind, err)
	}
	for _, c := range table.ColumnDefinitions {
		out = append(out, fmt.Sprintf("%s: %s %s %s %d", path, c.Name, c.Type, c.Format, c.Priority))
	}
	for _, row := range table.Rows {
		if row.Cells[0] != "shown" && row.Cells[0] != "unknown" {
			continue
		}
		text := make([]string, 0, len(row.Cells))
		for i, cell := range row.Cells {
			// kubectl shows nothing for nil, as for an empty text.
			if cell != nil && cell != "" && table.ColumnDefinitions[i].Name != "Age" {
				text = append(text, fmt.Sprintf("%s=%v", table.ColumnDefinitions[i].Name, cell))
			}
		}
		out = append(out, strings.Join(text, " "))
	}
	return out
}
