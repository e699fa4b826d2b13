package kubeobjects

import (
	"strings"
	"testing"
)

func TestDecode(t *testing.T) {
	got, err := Decode(strings.NewReader(`
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: A, metadata: {name: a}}
- {apiVersion: v1, kind: B, metadata: {name: b}}
---
---
{"apiVersion": "v1", "kind": "C", "metadata": {"name": "c"}}
`))
	if err != nil || len(got) != 3 || got[1].GetKind() != "B" || got[2].GetName() != "c" {
		t.Errorf("%v, %v", got, err)
	}
	for text, want := range map[string]string{
		"kind: A\nmetadata: {name: a}":                             "document 1: apiVersion is missing",
		"apiVersion: v1\nkind: A":                                  "document 1: metadata.name of the A is missing",
		"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1}\n": "document 1: kind is missing",
		"a: [":   "document 1: ",
		"- a":    "document 1: ",
		`{"a":1`: "document 1: ",
	} {
		if _, err := Decode(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
