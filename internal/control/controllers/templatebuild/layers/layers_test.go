package layers

import (
	"slices"
	"strings"
	"testing"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

func step(kind barchan.BuildStepType, args ...string) barchan.BuildStep {
	return barchan.BuildStep{Type: kind, Args: args}
}

func layers(t *testing.T, spec *barchan.TemplateBuildSpec, salt string) ([]layer, settings) {
	t.Helper()
	all, last, err := layersOf(ImageBase("base", "sha256:1"), spec.Steps, spec.Force, salt, nil)
	if err != nil {
		t.Fatal(err)
	}
	return all, last
}

func keys(all []layer) (keys []string) {
	for i := range all {
		keys = append(keys, all[i].key)
	}
	return keys
}

func TestLayers(t *testing.T) {
	t.Parallel()
	spec := &barchan.TemplateBuildSpec{Steps: []barchan.BuildStep{
		step(barchan.StepEnv, "A", "1", "B", "2"), step(barchan.StepUser, "root"), step(barchan.StepRun, "one"), step(barchan.StepRun, "two"),
		step(barchan.StepWorkdir, "sub"), step(barchan.StepEnv, "A", "3"),
	}}
	all, last := layers(t, spec, "")
	var sizes []int
	for i := range all {
		sizes = append(sizes, len(all[i].steps))
	}
	if !slices.Equal(sizes, []int{0, 3, 1, 2}) {
		t.Errorf("layers have %v steps, want none for the image, and one ends with each command", sizes)
	}
	if all[1].before.User != "user" || all[1].after.User != "root" || all[1].after.Env["B"] != "2" || all[3].first != 4 || len(all[3].steps) != 2 {
		t.Errorf("layers: %+v", all)
	}
	if last.User != "root" || last.Workdir != "/home/user/sub" || last.Env["A"] != "3" || all[1].after.Env["A"] != "1" {
		t.Errorf("the last settings: %+v; those of the first layer: %+v", last, all[1].after)
	}
	spec.Steps = append(spec.Steps[:4:4], step(barchan.StepEnv, "C", "4"))
	if only, last := layers(t, spec, ""); len(only) != 3 || last.Env["C"] != "4" {
		t.Errorf("variables alone make a layer: %d of them, %+v", len(only), last)
	}
}

// TestKeys has a layer be found by builds with the same steps below it, and by no others.
func TestKeys(t *testing.T) {
	t.Parallel()
	spec := func(steps ...barchan.BuildStep) *barchan.TemplateBuildSpec {
		return &barchan.TemplateBuildSpec{Steps: steps}
	}
	one, two, three := step(barchan.StepRun, "one"), step(barchan.StepRun, "two"), step(barchan.StepRun, "three")
	base, _ := layers(t, spec(one, two, three), "")
	common := func(s *barchan.TemplateBuildSpec, salt string) (n int) {
		t.Helper()
		all, _ := layers(t, s, salt)
		for n < len(all) && n < len(base) && all[n].key == base[n].key {
			n++
		}
		for _, k := range keys(all)[n:] {
			if slices.Contains(keys(base), k) {
				t.Errorf("a later layer is the same")
			}
		}
		return n
	}
	asRoot := step(barchan.StepRun, "two", "root")
	forced := two
	forced.Force = true
	copied := barchan.BuildStep{Type: barchan.StepCopy, Args: []string{"a", "b"}, FilesHash: strings.Repeat("0", 64)}
	for name, tt := range map[string]struct {
		spec *barchan.TemplateBuildSpec
		want int
	}{
		"same":            {spec(one, two, three), 4},
		"one more":        {spec(one, two, three, one), 4},
		"other last":      {spec(one, two, one), 3},
		"other user":      {spec(one, asRoot, three), 2},
		"other order":     {spec(two, one, three), 1},
		"variable before": {spec(one, step(barchan.StepEnv, "A", "1"), two, three), 2},
		"files":           {spec(one, copied, three), 2},
		"forced":          {spec(one, forced, three), 2},
		"all forced":      {&barchan.TemplateBuildSpec{Force: true, Steps: []barchan.BuildStep{one, two, three}}, 0},
	} {
		if got := common(tt.spec, "salt"); got != tt.want {
			t.Errorf("%s: %d layers are taken, want %d", name, got, tt.want)
		}
	}
	other, _, err := layersOf(ImageBase("base", "sha256:2"), spec(one).Steps, false, "", nil)
	if err != nil || slices.Contains(keys(base), other[0].key) {
		t.Errorf("another image of the name has the same layers: %v", err)
	}
}

func TestTooManyLayers(t *testing.T) {
	t.Parallel()
	spec := &barchan.TemplateBuildSpec{}
	for range maxLayers {
		spec.Steps = append(spec.Steps, step(barchan.StepRun, "true"))
	}
	_, _, err := layersOf(ImageBase("base", ""), spec.Steps, false, "", nil)
	if err == nil || !strings.HasPrefix(err.Error(), "spec.steps: ") {
		t.Errorf("%d commands: %v", len(spec.Steps), err)
	}
}
