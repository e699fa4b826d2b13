package sandbox

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

func TestCheckMounts(t *testing.T) {
	b := &agents.SandboxBlueprint{
		PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{VolumeMounts: []corev1.VolumeMount{{Name: "scratch"}, {Name: "nowhere"}, {Name: "data"}}}},
			Volumes:    []corev1.Volume{{Name: "scratch"}},
		}},
		VolumeClaimTemplates: []agents.PersistentVolumeClaimTemplate{{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}},
	}
	got := CheckMounts(b, field.NewPath("spec"))
	if len(got) != 1 || got[0].Field != "spec.containers[0].volumeMounts[1].name" || got[0].BadValue != "nowhere" {
		t.Errorf("CheckMounts = %v", got)
	}
}
