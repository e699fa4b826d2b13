package layers

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// TestKeysOfStages has a layer depend on what its stages have, and on how a command is run, and on nothing else of them.
func TestKeysOfStages(t *testing.T) {
	t.Parallel()
	key := func(stages map[string]string, s barchan.BuildStep) string {
		t.Helper()
		all, _, err := layersOf(ImageBase("base", ""), []barchan.BuildStep{s}, false, "", stages)
		if err != nil {
			t.Fatal(err)
		}
		return all[len(all)-1].key
	}
	one := map[string]string{"a": "k1", "b": "k1", "c": "k2"}
	copyOf := func(f barchan.StageFiles) barchan.BuildStep {
		return barchan.BuildStep{Type: barchan.StepCopy, Args: []string{"/x", "/y"}, From: &f}
	}
	mounted := func(m barchan.BuildMount) barchan.BuildStep {
		return barchan.BuildStep{Type: barchan.StepRun, Args: []string{"x"}, Mounts: []barchan.BuildMount{m}}
	}
	base := key(one, copyOf(barchan.StageFiles{Stage: "a"}))
	bind := key(one, mounted(barchan.BuildMount{Type: barchan.MountBind, Target: "/t", Stage: "a"}))
	if key(one, copyOf(barchan.StageFiles{Stage: "b"})) != base || key(one, mounted(barchan.BuildMount{Type: barchan.MountBind, Target: "/t", Stage: "b"})) != bind {
		t.Error("the name of a stage decides")
	}
	differ := []string{
		base, bind, key(one, copyOf(barchan.StageFiles{Stage: "c"})), key(one, copyOf(barchan.StageFiles{Stage: "a", Paths: []string{"/z"}})),
		key(one, copyOf(barchan.StageFiles{Stage: "a", Exclude: []string{"z"}})), key(one, copyOf(barchan.StageFiles{Stage: "a", Parents: true})),
		key(one, mounted(barchan.BuildMount{Type: barchan.MountBind, Target: "/t", Stage: "c"})), key(one, mounted(barchan.BuildMount{Type: barchan.MountTmpfs, Target: "/t"})),
		key(one, mounted(barchan.BuildMount{Type: barchan.MountSecret, ID: "s"})), key(one, barchan.BuildStep{Type: barchan.StepRun, Args: []string{"x"}}),
		key(one, barchan.BuildStep{Type: barchan.StepRun, Args: []string{"x"}, Network: barchan.NetworkNone}),
	}
	if n := len(slices.Compact(slices.Sorted(slices.Values(differ)))); n != len(differ) {
		t.Errorf("%d keys of %d differ", n, len(differ))
	}
}

func TestVolumesOfMounts(t *testing.T) {
	t.Parallel()
	b := ImageBase("x", "").blueprint
	addVolumes(&b, []mount{
		{dir: "/cache", BuildMount: barchan.BuildMount{Type: barchan.MountCache}},
		{dir: secretsDir, BuildMount: barchan.BuildMount{Type: barchan.MountSecret}},
		{dir: secretsDir, BuildMount: barchan.BuildMount{Type: barchan.MountSecret}},
		{BuildMount: barchan.BuildMount{Type: barchan.MountSecret, Env: "A"}},
		{dir: "/tmp/x", BuildMount: barchan.BuildMount{Type: barchan.MountTmpfs, SizeBytes: 4096}},
	})
	spec := b.PodTemplate.Spec
	var got []string
	for i, v := range spec.Volumes {
		got = append(got, v.Name+" "+spec.Containers[0].VolumeMounts[i].MountPath+" "+string(v.EmptyDir.Medium))
	}
	memory := string(corev1.StorageMediumMemory)
	if want := []string{"build-mount-0 /cache ", "build-mount-1 /run/secrets " + memory, "build-mount-4 /tmp/x " + memory}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if spec.Volumes[2].EmptyDir.SizeLimit.Value() != 4096 || b.PodTemplate.ObjectMeta.Annotations[agents.AnnotationTransientVolumes] != "build-mount-0,build-mount-1,build-mount-4" {
		t.Errorf("%+v", b.PodTemplate)
	}
}

func TestLockedCaches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &Work{r: &Runner{}, Build: &barchan.TemplateBuild{ObjectMeta: metav1.ObjectMeta{Namespace: "team"}}}
		lock := func(ctx context.Context, id string) (free func(), err error) {
			return w.lockCaches(ctx, []mount{{BuildMount: barchan.BuildMount{Type: barchan.MountCache, Sharing: barchan.SharingLocked, ID: id}}})
		}
		free, err := lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		other, err := lock(t.Context(), "b")
		if err != nil {
			t.Fatal(err)
		}
		other()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := lock(ctx, "a"); !errors.Is(err, context.Canceled) {
			t.Errorf("a wait that is canceled: %v", err)
		}
		held := false
		go func() {
			if free, err := lock(t.Context(), "a"); err == nil {
				held = true
				free()
			}
		}()
		if synctest.Wait(); held {
			t.Error("two steps have it")
		}
		free()
		synctest.Wait()
		a, _ := w.r.caches.Holder("team/a")
		b, _ := w.r.caches.Holder("team/b")
		if !held || a || b {
			t.Errorf("the other step has it: %t; locked: %t, %t", held, a, b)
		}
	})
}
