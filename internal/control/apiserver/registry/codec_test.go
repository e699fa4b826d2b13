package registry

import (
	"strings"
	"testing"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
)

// TestStorageCodec: what is stored is as by the scheme's own codec, in both directions.
func TestStorageCodec(t *testing.T) {
	all := kinds.All()
	scheme, err := kinds.NewScheme(all)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all {
		ours, theirs := storageCodec(scheme.Scheme, r.GV), scheme.Codecs.LegacyCodec(r.GV)
		o := r.New()
		o.(metav1.Object).SetName("a")
		if s, ok := o.(*agents.Sandbox); ok {
			s.Spec.OperatingMode, s.Annotations = agents.ModeSuspended, map[string]string{"kind": `"{\`}
		}
		text, err := runtime.Encode(ours, o)
		if err != nil {
			t.Fatal(err)
		}
		if want, err := runtime.Encode(theirs, o); err != nil || string(text) != string(want) {
			t.Errorf("%s is encoded as %s, want %s, %v", r.Kind, text, want, err)
		}
		x, _, err := ours.Decode(text, nil, r.New())
		y, _, other := theirs.Decode(text, nil, r.New())
		if err != nil || other != nil || !apiequality.Semantic.DeepEqual(x, y) {
			t.Errorf("%s is decoded as %+v, %v; want %+v, %v", r.Kind, x, err, y, other)
		}
		if kind, _, ok := cutString(text, `{"kind":"`); !ok || kind != r.Kind {
			t.Errorf("%s: the whole object is read for its kind: %s", r.Kind, text)
		}
	}
}

// FuzzKind: the kind is that of the library, except where text is no JSON.
func FuzzKind(f *testing.F) {
	for _, seed := range []string{
		`{"kind":"Sandbox","apiVersion":"agents.x-k8s.io/v1beta1","metadata":{}}`, `{"apiVersion":"v1","kind":"Secret"}`, `{"kind":"a\u0062","apiVersion":"v1"}`,
		`{"kind":"a","apiVersion":"a/b/c"}`, `{}`, `{"kind":"","apiVersion":""}`, ``, `{"kind":"`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		want, err := json.DefaultMetaFactory.Interpret([]byte(text))
		got, gotErr := firstFields{}.Interpret([]byte(text))
		if err != nil {
			return
		}
		if gotErr != nil || *got != *want && strings.Count(strings.ToLower(text), "kind") < 2 && strings.Count(strings.ToLower(text), "apiversion") < 2 && !strings.Contains(text, `\u`) { // no encoder repeats a field
			t.Errorf("%q has the kind %v, %v; want %v", text, got, gotErr, want)
		}
	})
}
