package kinds

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// Pods describes Pods. They are not stored: each is a view of a Sandbox.
func Pods() *Resource {
	return &Resource{
		GV: corev1.SchemeGroupVersion, Plural: "pods", Kind: "Pod", ShortNames: []string{"po"}, Namespaced: true,
		Object: &corev1.Pod{}, List: &corev1.PodList{},
		fields: selectable(func(p *corev1.Pod) fields.Set {
			return fields.Set{"status.phase": string(p.Status.Phase), "spec.nodeName": p.Spec.NodeName}
		}),
		columns: []column{
			text("Ready", func(p *corev1.Pod) string {
				ready := 0
				for _, c := range p.Status.ContainerStatuses {
					if c.Ready {
						ready++
					}
				}
				return fmt.Sprintf("%d/%d", ready, len(p.Spec.Containers))
			}),
			text("Status", func(p *corev1.Pod) string { return p.Status.Reason }),
			text("Restarts", func(*corev1.Pod) string { return "0" }),
			ageColumn(),
			wide(text("IP", func(p *corev1.Pod) string { return p.Status.PodIP })),
			wide(text("Node", func(p *corev1.Pod) string { return p.Spec.NodeName })),
		},
	}
}
