package podsource

import (
	"context"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// objects has a Secret login {token: s3, bad=name: x} and a ConfigMap looks {color: blue}, binary {raw: 0}.
type objects struct{}

func (objects) Secret(_ context.Context, namespace, name string) (*corev1.Secret, error) {
	if namespace != "ns" || name != "login" {
		return nil, nil
	}
	return &corev1.Secret{Data: map[string][]byte{"token": []byte("s3"), "bad=name": []byte("x")}}, nil
}

func (objects) ConfigMap(_ context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	if namespace != "ns" || name != "looks" {
		return nil, nil
	}
	return &corev1.ConfigMap{Data: map[string]string{"color": "blue"}, BinaryData: map[string][]byte{"raw": {0}}}, nil
}

func parse[T any](t *testing.T, text string) (x T) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(text), &x); err != nil {
		t.Fatal(err)
	}
	return x
}

func TestResolve(t *testing.T) {
	c := parse[corev1.Container](t, `
envFrom:
- {prefix: A_, secretRef: {name: login}}
- {configMapRef: {name: looks}}
- {configMapRef: {name: none, optional: true}}
env:
- {name: PLAIN, value: x}
- {name: TOKEN, valueFrom: {secretKeyRef: {name: login, key: token}}}
- {name: NONE, valueFrom: {secretKeyRef: {name: login, key: none, optional: true}}}
- {name: COLOR, valueFrom: {configMapKeyRef: {name: looks, key: color}}}
`)
	got, err := Resolve(t.Context(), objects{}, "ns", c.Env, c.EnvFrom)
	if err != nil || !maps.Equal(got.From, map[string]string{"A_token": "s3", "color": "blue"}) || !maps.Equal(got.Keys, map[int]string{1: "s3", 3: "blue"}) {
		t.Errorf("%v, %v", got, err)
	}
	for text, want := range map[string]string{
		"env: [{name: A, valueFrom: {secretKeyRef: {name: none, key: a}}}]":       `secret "none" not found`,
		"env: [{name: A, valueFrom: {secretKeyRef: {name: login, key: a}}}]":      "couldn't find key a in Secret ns/login",
		"env: [{name: A, valueFrom: {configMapKeyRef: {name: none, key: a}}}]":    `configmap "none" not found`,
		"env: [{name: A, valueFrom: {configMapKeyRef: {name: looks, key: raw}}}]": "couldn't find key raw in ConfigMap ns/looks",
		"envFrom: [{secretRef: {name: none}}]":                                    `secret "none" not found`,
	} {
		c := parse[corev1.Container](t, text)
		_, err := Resolve(t.Context(), objects{}, "ns", c.Env, c.EnvFrom)
		if m, ok := err.(*Missing); !ok || m.Reason != ReasonConfig || m.Message != want { //nolint:errorlint // unwrapped
			t.Errorf("%s: %v", text, err)
		}
	}
}

// own has fields that are their paths.
type own struct{}

func (own) Field(path string) string                          { return path }
func (own) Resource(ref *corev1.ResourceFieldSelector) string { return ref.Resource }

func TestFiles(t *testing.T) {
	for text, want := range map[string]map[string]File{
		"secret: {secretName: login, defaultMode: 0400}":                           {"token": {[]byte("s3"), 0o400}, "bad=name": {[]byte("x"), 0o400}},
		"configMap: {name: looks}":                                                 {"color": {[]byte("blue"), 0o644}, "raw": {[]byte{0}, 0o644}},
		"configMap: {name: looks, items: [{key: color, path: a/./b, mode: 0600}]}": {"a/b": {[]byte("blue"), 0o600}},
		"configMap: {name: looks, optional: true, items: [{key: none, path: a}]}":  {},
		"secret: {secretName: none, optional: true}":                               {},
		"downwardAPI: {items: [{path: a, fieldRef: {fieldPath: metadata.name}}, {path: b, resourceFieldRef: {containerName: c, resource: limits.cpu}}]}": {
			"a": {[]byte("metadata.name"), 0o644}, "b": {[]byte("limits.cpu"), 0o644},
		},
		"projected: {sources: [{configMap: {name: looks, items: [{key: color, path: x}]}}, {secret: {name: login, items: [{key: token, path: x}]}}]}": {"x": {[]byte("s3"), 0o644}},
	} {
		v := parse[corev1.Volume](t, "name: v\n"+text)
		got, err := Files(t.Context(), objects{}, "ns", "v", Projected(&v), own{})
		same := maps.EqualFunc(got, want, func(a, b File) bool { return string(a.Data) == string(b.Data) && a.Mode == b.Mode })
		if err != nil || !same {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		"secret: {secretName: none}":                              `MountVolume.SetUp failed for volume "v" : secret "none" not found`,
		"configMap: {name: looks, items: [{key: none, path: a}]}": `MountVolume.SetUp failed for volume "v" : references non-existent config key: none`,
	} {
		v := parse[corev1.Volume](t, "name: v\n"+text)
		_, err := Files(t.Context(), objects{}, "ns", "v", Projected(&v), own{})
		if m, ok := err.(*Missing); !ok || m.Reason != ReasonMount || m.Message != want { //nolint:errorlint // unwrapped
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestReferences(t *testing.T) {
	spec := parse[corev1.PodSpec](t, `
initContainers: [{name: i, envFrom: [{secretRef: {name: a}}]}]
containers: [{name: c, env: [{name: X, valueFrom: {configMapKeyRef: {name: b, key: k}}}, {name: Y, valueFrom: {secretKeyRef: {name: a, key: k}}}]}]
volumes:
- {name: v, projected: {sources: [{secret: {name: d}}, {configMap: {name: e}}]}}
- {name: w, emptyDir: {}}
`)
	want := []Reference{{KindSecret, "a"}, {KindConfigMap, "b"}, {KindSecret, "d"}, {KindConfigMap, "e"}}
	if got := References(&spec); !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

// TestCheck: each fault is refused by its field, and what README-style manifests have is accepted.
func TestCheck(t *testing.T) {
	for text, want := range map[string]string{
		"env: [{name: A=B}]": "env[0].name",
		"env: [{name: A, value: x, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]":                      "env[0].valueFrom",
		"env: [{name: A, valueFrom: {}}]":                                                                    "env[0].valueFrom",
		"env: [{name: A, valueFrom: {secretKeyRef: {name: a, key: k}, configMapKeyRef: {name: a, key: k}}}]": "env[0].valueFrom",
		"env: [{name: A, valueFrom: {secretKeyRef: {name: A, key: k}}}]":                                     "env[0].valueFrom.secretKeyRef.name",
		"env: [{name: A, valueFrom: {configMapKeyRef: {name: a, key: ../k}}}]":                               "env[0].valueFrom.configMapKeyRef.key",
		"env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}]":                                "env[0].valueFrom.fieldRef.fieldPath",
		"env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.gpu}}}]":                            "env[0].valueFrom.resourceFieldRef.resource",
		"env: [{name: A, valueFrom: {resourceFieldRef: {containerName: other, resource: limits.cpu}}}]":      "env[0].valueFrom.resourceFieldRef.containerName",
		"env: [{name: A, valueFrom: {fileKeyRef: {volumeName: v, path: p, key: k}}}]":                        "env[0].valueFrom.fileKeyRef",
		"envFrom: [{}]": "envFrom[0]",
		"envFrom: [{secretRef: {name: a}, configMapRef: {name: a}}]":                                                                     "envFrom[0]",
		"envFrom: [{prefix: 'a=', secretRef: {name: a}}]":                                                                                "envFrom[0].prefix",
		"{env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['a']\"}}}], envFrom: [{prefix: x, secretRef: {name: a}}]}": "",
	} {
		c := parse[corev1.Container](t, text)
		wantField(t, text, CheckEnv(&c, nil), want)
	}
	for text, want := range map[string]string{
		"secret: {secretName: ''}":                                                                         "secret.secretName",
		"secret: {secretName: a, defaultMode: 01000}":                                                      "secret.defaultMode",
		"configMap: {name: a, items: [{key: k, path: ../x}]}":                                              "configMap.items[0].path",
		"configMap: {name: a, items: [{key: k, path: ..x}]}":                                               "configMap.items[0].path",
		"configMap: {name: a, items: [{key: k, path: /x}]}":                                                "configMap.items[0].path",
		"configMap: {name: a, items: [{key: '', path: x}]}":                                                "configMap.items[0].key",
		"downwardAPI: {items: [{path: a, fieldRef: {fieldPath: status.podIP}}]}":                           "downwardAPI.items[0].fieldRef.fieldPath",
		"downwardAPI: {items: [{path: a}]}":                                                                "downwardAPI.items[0]",
		"downwardAPI: {items: [{path: a, resourceFieldRef: {resource: limits.cpu}}]}":                      "downwardAPI.items[0].resourceFieldRef.containerName",
		"projected: {sources: [{}]}":                                                                       "projected.sources[0]",
		"projected: {sources: [{serviceAccountToken: {path: t}}]}":                                         "projected.sources[0].serviceAccountToken",
		"projected: {sources: [{secret: {name: a}}, {configMap: {name: a, items: [{key: k, path: ''}]}}]}": "projected.sources[1].configMap.items[0].path",
		"projected: {sources: [{secret: {name: a}}]}":                                                      "",
	} {
		v := parse[corev1.Volume](t, "name: v\n"+text)
		wantField(t, text, CheckVolume(&v, Projected(&v), "c", nil), want)
	}
	many := &corev1.Volume{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{DefaultMode: ptr.To[int32](0o600)}}}
	many.Projected.Sources = slices.Repeat([]corev1.VolumeProjection{{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "a"}}}}, maxSources+1)
	wantField(t, "many sources", CheckVolume(many, many.Projected, "c", nil), "projected.sources")
}

func wantField(t *testing.T, what string, got field.ErrorList, want string) {
	t.Helper()
	if (want == "") != (len(got) == 0) || len(got) > 0 && !slices.ContainsFunc(got, func(e *field.Error) bool { return e.Field == want }) {
		t.Errorf("%s: %v, want a fault of %q", what, got, want)
	}
}

func TestMap(t *testing.T) {
	if got := Map(map[string]string{"b": "x\n", "a": `"`}); got != "a=\"\\\"\"\nb=\"x\\n\"" {
		t.Errorf("%q", got)
	}
}
