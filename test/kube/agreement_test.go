package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
)

// kind is one of ours, with a valid object of it.
type kind struct {
	gvk   schema.GroupVersionKind
	typed func() client.Object
	spec  string // YAML
}

const revision = "0123456789abcdefghijklmnopqrstuv0123456789abcdefghij"

// kinds are all of ours by name.
func kinds() map[string]kind {
	pod := "podTemplate: {spec: {containers: [{name: main, image: x}]}}"
	all := map[string]kind{
		"Sandbox":         {agents.GroupVersion.WithKind(""), func() client.Object { return &agents.Sandbox{} }, pod},
		"SandboxTemplate": {extensions.GroupVersion.WithKind(""), func() client.Object { return &extensions.SandboxTemplate{} }, pod},
		"SandboxWarmPool": {extensions.GroupVersion.WithKind(""), func() client.Object { return &extensions.SandboxWarmPool{} }, "sandboxTemplateRef: {name: t}"},
		"SandboxClaim":    {extensions.GroupVersion.WithKind(""), func() client.Object { return &extensions.SandboxClaim{} }, "warmPoolRef: {name: p}"},
		"Checkpoint":      {barchan.GroupVersion.WithKind(""), func() client.Object { return &barchan.Checkpoint{} }, "sandboxName: s"},
		"APIKey":          {barchan.GroupVersion.WithKind(""), func() client.Object { return &barchan.APIKey{} }, "sha256: " + strings.Repeat("0123456789abcdef", 4)},
		"TemplateRevision": {
			barchan.GroupVersion.WithKind(""), func() client.Object { return &barchan.TemplateRevision{} },
			"{templateName: t, revision: " + revision + ", number: 1, content: {a: {b: [1, x]}}}",
		},
		"TemplateBuild": {barchan.GroupVersion.WithKind(""), func() client.Object { return &barchan.TemplateBuild{} }, "templateName: t"},
	}
	for name, k := range all {
		k.gvk.Kind = name
		all[name] = k
	}
	return all
}

// object returns a valid object with the changes made; null takes a field away.
func (k kind) object(t *testing.T, name, changes string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{}, "spec": read(t, k.spec)}}
	u.SetGroupVersionKind(k.gvk)
	u.SetName(name)
	u.SetNamespace(metav1.NamespaceDefault)
	merge(u.Object, read(t, changes))
	return u
}

func read(t *testing.T, text string) map[string]any {
	t.Helper()
	j, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	var u unstructured.Unstructured // numbers as Kubernetes requires them
	if err := json.Unmarshal(fmt.Appendf(nil, `{"apiVersion":"v1","kind":"X","o":%s}`, j), &u); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	o, _, err := unstructured.NestedMap(u.Object, "o")
	if err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return o
}

// merge applies a JSON merge patch to an object; nulls in new objects stay.
func merge(into, changes map[string]any) {
	for key, change := range changes {
		have, isMap := into[key].(map[string]any)
		wanted, wantMap := change.(map[string]any)
		_, there := into[key]
		switch {
		case isMap && wantMap:
			merge(have, wanted)
		case change == nil && there:
			delete(into, key)
		default:
			into[key] = change
		}
	}
}

// server is one of the two that must agree.
type server struct {
	name   string
	config *rest.Config
	client.WithWatch
}

// both starts the two servers.
func both(t *testing.T) (own, kube server) {
	t.Helper()
	api := embedded.APIServer(t).RESTConfig(apiserver.UserAdmin)
	cfg := startKube(t)
	kube = server{"real", cfg, newClient(t, cfg)}
	t.Cleanup(func() { kube.clear(t) })
	return server{"embedded", api, newClient(t, api)}, kube
}

// clear removes the objects of the test, which controllers of other tests would see.
func (s server) clear(t *testing.T) {
	for name, k := range kinds() {
		if err := s.DeleteAllOf(context.WithoutCancel(t.Context()), k.typed(), client.InNamespace(metav1.NamespaceDefault)); err != nil {
			t.Errorf("remove every %s: %v", name, err)
		}
	}
}

// answer is a server's response to an object.
type answer struct {
	object *unstructured.Unstructured
	err    error
}

// submit creates the object and applies a merge patch.
func (s server) submit(ctx context.Context, o *unstructured.Unstructured, change map[string]any) (a answer) {
	a.object = o.DeepCopy()
	a.err = s.Create(ctx, a.object)
	if change == nil {
		return a
	}
	if a.err != nil {
		a.err = fmt.Errorf("a valid object was refused: %w", errors.New(a.err.Error())) // not as a refusal
		return a
	}
	patch, err := json.Marshal(change)
	if err != nil {
		return answer{err: err}
	}
	a.err = s.Patch(ctx, a.object, client.RawPatch(types.MergePatchType, patch))
	return a
}

// fields are those that a refusal names; nil if it is none.
func (a answer) fields(want string) []string {
	var status apierrors.APIStatus
	if !errors.As(a.err, &status) || (!apierrors.IsInvalid(a.err) && !apierrors.IsBadRequest(a.err)) {
		return nil
	}
	named := sets.New[string]()
	if d := status.Status().Details; d != nil {
		for _, c := range d.Causes {
			if c.Field != "<nil>" { // marks that there may be more
				named.Insert(strings.TrimPrefix(c.Field, ".")) // it stands before the paths of subresources
			}
		}
	}
	// What cannot even be decoded has no causes; its message names the field.
	if len(named) == 0 && strings.Contains(a.err.Error(), want[strings.LastIndexByte(want, '.'):]) {
		named.Insert(want)
	}
	return sets.List(named)
}

// TestAgreement: the embedded server and Kubernetes with our CRDs return the same for the same
// objects, and store the same of those that they take.
func TestAgreement(t *testing.T) {
	own, kube := both(t)
	all := kinds()
	for i, tt := range verdicts() {
		t.Run(tt.kind+"/"+tt.name, func(t *testing.T) {
			o := all[tt.kind].object(t, fmt.Sprintf("o%d", i), tt.object)
			var change map[string]any
			if tt.change != "" {
				change = read(t, tt.change)
			}
			var answers [2]answer
			var wg sync.WaitGroup
			for i, s := range []server{own, kube} {
				wg.Go(func() { answers[i] = s.submit(t.Context(), o, change) })
			}
			wg.Wait()
			tt.check(t, own.name, answers[0], tt.field)
			tt.check(t, kube.name, answers[1], tt.realField())
			if answers[0].err == nil && answers[1].err == nil {
				compare(t, all[tt.kind], answers[0].object, answers[1].object)
			}
		})
	}
	seen := sets.New[string]()
	for _, tt := range verdicts() {
		seen.Insert(tt.kind)
	}
	if missing := sets.KeySet(all).Difference(seen); missing.Len() > 0 {
		t.Errorf("no verdicts on %v", sets.List(missing))
	}
}

// TestWhoseServer: a replica verifies agents only where the version of its API server is not ours.
func TestWhoseServer(t *testing.T) {
	own, kube := both(t)
	for _, s := range []server{own, kube} {
		api, err := discovery.NewDiscoveryClientForConfig(s.config)
		if err != nil {
			t.Fatal(err)
		}
		info, err := api.ServerVersion()
		if err != nil || apiserver.IsOurs(info) != (s.name == own.name) {
			t.Errorf("%s: version %+v, %v", s.name, info, err)
		}
	}
}

func (v verdict) check(t *testing.T, server string, a answer, field string) {
	t.Helper()
	switch got := a.fields(field); {
	case field == "" && a.err != nil:
		t.Errorf("%s: %v, want it taken", server, a.err)
	case field != "" && !slices.Equal(got, []string{field}):
		t.Errorf("%s: %v, names %q, want only %s refused", server, a.err, got, field)
	}
}

// compare reports differences between the objects that two servers stored, by our types.
func compare(t *testing.T, k kind, a, b *unstructured.Unstructured) {
	t.Helper()
	specA, specB := stored(t, k, a), stored(t, k, b)
	for _, key := range slices.Sorted(maps.Keys(specA)) {
		if !apiequality.Semantic.DeepEqual(specA[key], specB[key]) {
			t.Errorf("%s: embedded has %v, real has %v", key, specA[key], specB[key])
		}
	}
	if len(specA) != len(specB) {
		t.Errorf("embedded has %v, real has %v", specA, specB)
	}
	if a.GetGeneration() != b.GetGeneration() {
		t.Errorf("generation: embedded has %d, real has %d", a.GetGeneration(), b.GetGeneration())
	}
	if !maps.Equal(a.GetLabels(), b.GetLabels()) || !maps.Equal(a.GetAnnotations(), b.GetAnnotations()) || !slices.Equal(a.GetFinalizers(), b.GetFinalizers()) {
		t.Errorf("metadata: embedded has %v, real has %v", a.Object["metadata"], b.Object["metadata"])
	}
}

// stored reads a spec into our type and back, so that what is empty is left out alike.
func stored(t *testing.T, k kind, u *unstructured.Unstructured) map[string]any {
	t.Helper()
	typed := k.typed()
	text, err := u.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(text, typed)
	}
	if err == nil {
		text, err = json.Marshal(typed)
	}
	var back map[string]any
	if err == nil {
		err = json.Unmarshal(text, &back)
	}
	spec, ok := back["spec"].(map[string]any)
	if err != nil || !ok {
		t.Fatalf("%s: %v in %v", k.gvk.Kind, err, u.Object)
	}
	return spec
}
