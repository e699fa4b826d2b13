package templatebuild

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// kept is a layer that was last used some time ago.
func kept(name string, content barchan.CheckpointContent, now time.Time, ago time.Duration) barchan.Checkpoint {
	return barchan.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{barchan.LabelPurpose: barchan.PurposeBuild},
			Annotations: map[string]string{barchan.AnnotationUsedAt: now.Add(-ago).Format(time.RFC3339Nano)},
		},
		Spec: barchan.CheckpointSpec{Content: content},
	}
}

func TestUnusedLayers(t *testing.T) {
	t.Parallel()
	now := time.Now()
	users, dying := kept("users", barchan.ContentFiles, now, 2*layerTTL), kept("dying", barchan.ContentFiles, now, 2*layerTTL)
	users.Labels, dying.DeletionTimestamp = nil, new(metav1.Now())
	all := []barchan.Checkpoint{
		kept("young", barchan.ContentFiles, now, layerTTL-time.Minute), kept("old", barchan.ContentFiles, now, layerTTL+time.Minute),
		kept("memory", barchan.ContentMemoryAndFiles, now, memoryTTL-time.Minute), kept("old memory", barchan.ContentMemoryAndFiles, now, memoryTTL+time.Minute),
		kept("template's", barchan.ContentMemoryAndFiles, now, 2*layerTTL), users, dying,
	}
	var gone []string
	for _, c := range unused(all, sets.New("template's"), now) {
		gone = append(gone, c.Name)
	}
	if !slices.Equal(gone, []string{"old memory", "old"}) {
		t.Errorf("%v are removed", gone)
	}
	all = nil
	for i := range maxKept + 2 {
		all = append(all, kept(fmt.Sprint(i), barchan.ContentFiles, now, time.Duration(i)*time.Second))
	}
	if gone := unused(all, nil, now); len(gone) != 2 || gone[0].Name != fmt.Sprint(maxKept) {
		t.Errorf("of too many %d are removed, first %+v", len(gone), gone)
	}
}

// inMemory has the objects that pruneLayers reads.
type inMemory struct {
	Objects
	checkpoints []barchan.Checkpoint
	templates   []extensions.SandboxTemplate
}

func (m *inMemory) Checkpoints(context.Context, string) ([]barchan.Checkpoint, error) {
	return m.checkpoints, nil
}

func (m *inMemory) Templates(context.Context, string) ([]extensions.SandboxTemplate, error) {
	return m.templates, nil
}

// A layer that a tag alone refers to stays: the tag is a template of its own.
func TestLayersOfTagsStay(t *testing.T) {
	t.Parallel()
	scheme := runtime.NewScheme()
	if err := barchan.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	objects := &inMemory{checkpoints: []barchan.Checkpoint{
		kept("default", barchan.ContentMemoryAndFiles, now, 2*layerTTL), kept("tagged", barchan.ContentMemoryAndFiles, now, 2*layerTTL),
		kept("neither", barchan.ContentMemoryAndFiles, now, 2*layerTTL),
	}}
	build := fake.NewClientBuilder().WithScheme(scheme)
	for i := range objects.checkpoints {
		build = build.WithObjects(&objects.checkpoints[i])
	}
	for name, checkpoint := range map[string]string{"my-app": "default", "my-app.v1": "tagged"} {
		tag := extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Name: name}}
		tag.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: checkpoint}}}
		objects.templates = append(objects.templates, tag)
	}
	r := &reconciler{Config: Config{Objects: objects, Client: build.Build()}}
	for i := range objects.checkpoints { // with the versions that they have in the API
		if err := r.Client.Get(t.Context(), client.ObjectKeyFromObject(&objects.checkpoints[i]), &objects.checkpoints[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.pruneLayers(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	var left barchan.CheckpointList
	if err := r.Client.List(t.Context(), &left); err != nil {
		t.Fatal(err)
	}
	var names []string
	for i := range left.Items {
		names = append(names, left.Items[i].Name)
	}
	if slices.Sort(names); !slices.Equal(names, []string{"default", "tagged"}) {
		t.Errorf("%v are left", names)
	}
}
