package v1alpha1

import (
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestValidateTemplateBuildStages(t *testing.T) {
	t.Parallel()
	hash := strings.Repeat("0123456789abcdef", 4)
	run := func(mount string) string { return "steps: [{type: Run, args: [a], mounts: [" + mount + "]}]" }
	tests := map[string]struct{ spec, want string }{ // want: fields, with spaces between
		"all": {spec: "stages: [{name: a, from: {image: x}}, {name: b, from: {templateName: t}, steps: [{type: Copy, args: [/a, /b], from: {stage: a, paths: [/c], exclude: [d], parents: true}}]}]\n" +
			"steps: [{type: Copy, args: [/a, /b, '7', '0644'], from: {stage: b}}, {type: Run, args: [a], network: None, mounts: [{type: Cache, target: /c, id: c, sharing: Locked, owner: '1:2', mode: '755'}, " +
			"{type: Bind, target: /d, stage: a, source: /x}, {type: Bind, target: /e, filesHash: " + hash + "}, {type: Tmpfs, target: /f, sizeBytes: 1}, {type: Secret, id: s, required: true}, {type: Secret, id: s, env: S}]}]"},
		"stage's name":          {spec: "stages: [{name: A_b, from: {image: x}}]", want: "spec.stages[0].name"},
		"the same name":         {spec: "stages: [{name: a, from: {image: x}}, {name: a, from: {image: x}}]", want: "spec.stages[1].name"},
		"stage from nothing":    {spec: "stages: [{name: a, from: {}}]", want: "spec.stages[0].from"},
		"stage's step":          {spec: "stages: [{name: a, from: {image: x}, steps: [{type: Run, args: []}]}]", want: "spec.stages[0].steps[0].args"},
		"stage's Secrets":       {spec: "stages: [{name: a, from: {image: x, imagePullSecrets: [{name: reg}, {name: No_Name}]}}, {name: b, from: {templateName: t, imagePullSecrets: [{name: reg}]}}]", want: "spec.stages[0].from.imagePullSecrets[1].name spec.stages[1].from.imagePullSecrets"},
		"too many Secrets":      {spec: "stages: [{name: a, from: {image: x, imagePullSecrets: [" + strings.Repeat("{name: a}, ", 17) + "]}}]", want: "spec.stages[0].from.imagePullSecrets"},
		"later stage":           {spec: "stages: [{name: a, from: {image: x}, steps: [{type: Copy, args: [a, b], from: {stage: b}}]}, {name: b, from: {image: x}}]", want: "spec.stages[0].steps[0].from.stage"},
		"itself":                {spec: "stages: [{name: a, from: {image: x}, steps: [{type: Copy, args: [a, b], from: {stage: a}}]}]", want: "spec.stages[0].steps[0].from.stage"},
		"no stage":              {spec: "steps: [{type: Copy, args: [a, b], from: {stage: ''}}]", want: "spec.steps[0].from.stage"},
		"files of both":         {spec: "stages: [{name: a, from: {image: x}}]\nsteps: [{type: Copy, args: [a, b], from: {stage: a}, filesHash: " + hash + "}]", want: "spec.steps[0].filesHash"},
		"files of a run":        {spec: "stages: [{name: a, from: {image: x}}]\nsteps: [{type: Run, args: [a], from: {stage: a}}]", want: "spec.steps[0].from"},
		"empty path":            {spec: "stages: [{name: a, from: {image: x}}]\nsteps: [{type: Copy, args: [a, b], from: {stage: a, paths: [''], exclude: ['']}}]", want: "spec.steps[0].from.paths[0] spec.steps[0].from.exclude[0]"},
		"mounts of a copy":      {spec: "steps: [{type: Copy, args: [a, b], filesHash: " + hash + ", mounts: [{type: Tmpfs, target: /a}]}]", want: "spec.steps[0].mounts"},
		"network":               {spec: "steps: [{type: Run, args: [a], network: Host}, {type: User, args: [a], network: None}]", want: "spec.steps[0].network spec.steps[1].network"},
		"type":                  {spec: run("{type: SSH, target: /a}"), want: "spec.steps[0].mounts[0].type"},
		"no target":             {spec: run("{type: Cache}, {type: Tmpfs, target: a}, {type: Cache, target: /a/..}"), want: "spec.steps[0].mounts[0].target spec.steps[0].mounts[1].target spec.steps[0].mounts[2].target"},
		"the same target":       {spec: run("{type: Cache, target: /a}, {type: Tmpfs, target: /a/}"), want: "spec.steps[0].mounts[1].target"},
		"fields of others":      {spec: run("{type: Tmpfs, target: /a, id: x, sharing: Locked, stage: a, source: b, owner: '1:1', mode: '755', env: A, required: true}"), want: "id sharing stage source owner mode env required"},
		"size of a cache":       {spec: run("{type: Cache, target: /a, sizeBytes: -1}"), want: "sizeBytes sizeBytes"},
		"bind of nothing":       {spec: run("{type: Bind, target: /a}, {type: Bind, target: /b, stage: none}"), want: "spec.steps[0].mounts[0].filesHash spec.steps[0].mounts[1].stage"},
		"secret's ID":           {spec: run("{type: Secret}, {type: Secret, id: ../a}"), want: "spec.steps[0].mounts[0].id spec.steps[0].mounts[1].id"},
		"secret of two":         {spec: run("{type: Secret, id: a, env: A, target: /a}"), want: "spec.steps[0].mounts[0].target"},
		"forms":                 {spec: run("{type: Secret, id: a, env: 'A B', owner: root, mode: u+x}, {type: Cache, target: /a, sharing: Some}"), want: "owner mode env sharing"},
		"too many stages":       {spec: "stages: [" + strings.Repeat("{name: a, from: {image: x}}, ", 33) + "]", want: "spec.stages " + strings.Repeat("name ", 32)},
		"too many of one stage": {spec: "stages: [{name: a, from: {image: x}, steps: [" + strings.Repeat("{type: User, args: [a]}, ", 257) + "]}]", want: "spec.stages[0].steps"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &TemplateBuild{}
			if err := yaml.UnmarshalStrict([]byte(tt.spec), &b.Spec); err != nil {
				t.Fatal(err)
			}
			b.Spec.TemplateName, b.Spec.From = "t", &BuildSource{Image: "x"}
			list := ValidateTemplateBuild(b, nil)
			want := strings.Fields(tt.want)
			if len(list) != len(want) {
				t.Fatalf("%v, want %q", list, want)
			}
			for i, e := range list {
				if !strings.HasSuffix(e.Field, want[i]) {
					t.Errorf("%v, want %q", e, want[i])
				}
			}
		})
	}
}
