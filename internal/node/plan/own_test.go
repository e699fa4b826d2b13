package plan

import (
	"maps"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// TestEnvironment: a variable of env wins over envFrom, which wins over the image.
func TestEnvironment(t *testing.T) {
	var c corev1.Container
	if err := yaml.UnmarshalStrict([]byte(`
env:
- {name: TOKEN, valueFrom: {secretKeyRef: {name: a, key: k}}}
- {name: BEARER, value: "Bearer $(TOKEN) of $(FROM)"}
- {name: BOTH, value: env}
- {name: NONE, valueFrom: {secretKeyRef: {name: a, key: n, optional: true}}}
- {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: LABEL, valueFrom: {fieldRef: {fieldPath: "metadata.labels['a/b']"}}}
- {name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
- {name: MILLIS, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}}
- {name: MIB, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}}
- {name: ASKED, valueFrom: {resourceFieldRef: {resource: requests.memory}}}
`), &c); err != nil {
		t.Fatal(err)
	}
	p := Plan{
		Ref: sandbox.Ref{Name: "s"}, Env: c.Env, Limits: oci.Limits{MilliCPU: 1500, Memory: 512 << 20},
		Own: &Own{Labels: map[string]string{"a/b": "x"}, Requests: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Ki")}},
	}
	got := p.Environment([]string{"FROM=image", "BOTH=image", "IMAGE=yes"}, netip.MustParseAddr("10.0.0.1"), "node", podsource.Variables{
		From: map[string]string{"FROM": "source", "BOTH": "source"}, Keys: map[int]string{0: "s3"},
	})
	want := map[string]string{
		"PATH": DefaultPath, "IMAGE": "yes", "FROM": "source", "TOKEN": "s3", "BEARER": "Bearer s3 of source", "BOTH": "env", "NAME": "s", "IP": "10.0.0.1",
		"LABEL": "x", "CPU": "2", "MILLIS": "1500", "MIB": "512", "ASKED": "1024",
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
