package kinds

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	apiextensionsinternal "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// crds reads the CRDs that are generated from the same types.
func crds(t *testing.T) map[string]*apiextensions.CustomResourceDefinition {
	t.Helper()
	files, err := filepath.Glob("../../../../api/crds/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs (%v)", err)
	}
	all := map[string]*apiextensions.CustomResourceDefinition{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(text, &crd); err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		all[crd.Spec.Names.Kind] = &crd
	}
	return all
}

// TestLikeTheCRDs: the embedded server serves our kinds as the CRDs make Kubernetes serve them.
func TestLikeTheCRDs(t *testing.T) {
	all := crds(t)
	if len(all) != len(own()) {
		t.Errorf("%d CRDs, %d kinds", len(all), len(own()))
	}
	for _, r := range own() {
		t.Run(r.Kind, func(t *testing.T) {
			crd := all[r.Kind]
			if crd == nil {
				t.Fatal("no CRD")
			}
			v := crd.Spec.Versions[0]
			if crd.Spec.Group != r.GV.Group || v.Name != r.GV.Version || crd.Spec.Names.Plural != r.Plural ||
				crd.Spec.Names.Singular != r.GetSingularName() || !slices.Equal(crd.Spec.Names.ShortNames, r.ShortNames) ||
				(crd.Spec.Scope == apiextensions.NamespaceScoped) != r.Namespaced {
				t.Errorf("names: %+v in the CRD, %s %s %v here", crd.Spec.Names, r.GV, r.Plural, r.ShortNames)
			}
			compareVersion(t, r, &v)
		})
	}
}

func compareVersion(t *testing.T, r *Resource, v *apiextensions.CustomResourceDefinitionVersion) {
	t.Helper()
	status := v.Subresources != nil && v.Subresources.Status != nil
	scale := v.Subresources != nil && v.Subresources.Scale != nil
	if status != r.Status || scale != (r.Scale != nil) {
		t.Errorf("subresources in the CRD: status %v, scale %v", status, scale)
	}
	want := v.AdditionalPrinterColumns
	if len(want) == 0 { // what Kubernetes shows then
		want = []apiextensions.CustomResourceColumnDefinition{{Name: "Age", Type: "date"}}
	}
	got := make([]apiextensions.CustomResourceColumnDefinition, 0, len(r.columns))
	for _, c := range r.columns {
		got = append(got, apiextensions.CustomResourceColumnDefinition{Name: c.Name, Type: c.Type, Priority: c.Priority})
	}
	for i := range want {
		want[i].JSONPath, want[i].Description = "", ""
	}
	if !slices.Equal(got, want) {
		t.Errorf("columns %v, want %v", got, want)
	}
}

// TestCRDsAreValid runs Kubernetes' own validation, CEL rules and structural schema included.
func TestCRDsAreValid(t *testing.T) {
	s := runtime.NewScheme()
	if err := apiextensions.AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	for name, crd := range crds(t) {
		s.Default(crd)
		var in apiextensionsinternal.CustomResourceDefinition
		if err := apiextensions.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(crd, &in, nil); err != nil {
			t.Fatal(err)
		}
		in.Status.StoredVersions = []string{crd.Spec.Versions[0].Name}
		for _, e := range validation.ValidateCustomResourceDefinition(t.Context(), &in) {
			t.Errorf("%s: %v", name, e)
		}
	}
}

func TestTable(t *testing.T) {
	ready := agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Name: "a", CreationTimestamp: metav1.NewTime(time.Now().Add(-time.Hour))},
		Status: agents.SandboxStatus{Conditions: []metav1.Condition{
			{Type: agents.ConditionSuspended, Status: metav1.ConditionFalse},
			{Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: "R"},
		}},
	}
	remaining := int64(3)
	list := &agents.SandboxList{
		ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "c", RemainingItemCount: &remaining},
		Items:    []agents.Sandbox{ready, {ObjectMeta: metav1.ObjectMeta{Name: "b"}}},
	}
	table, err := sandboxKind().ConvertToTable(t.Context(), list, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(table.Rows) != 2 || !slices.Equal(table.Rows[0].Cells, []any{"a", "True", "R", "60m"}) || !slices.Equal(table.Rows[1].Cells, []any{"b", "", "", nil}) {
		t.Errorf("rows %v", table.Rows)
	}
	if table.ResourceVersion != "7" || table.Continue != "c" || *table.RemainingItemCount != 3 {
		t.Errorf("list metadata %+v", table.ListMeta)
	}
	table, err = sandboxKind().ConvertToTable(t.Context(), &ready, &metav1.TableOptions{NoHeaders: true})
	if err != nil || len(table.ColumnDefinitions) != 0 || len(table.Rows) != 1 {
		t.Errorf("one object without headers: %v, %+v", err, table)
	}
}
