package templatebuild

import (
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
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
