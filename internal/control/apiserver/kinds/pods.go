package kinds

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
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
			text("Status", podReason),
			text("Restarts", func(p *corev1.Pod) string {
				restarts := int32(0)
				for _, c := range p.Status.ContainerStatuses {
					restarts += c.RestartCount
				}
				return strconv.Itoa(int(restarts))
			}),
			ageColumn(),
			wide(text("IP", func(p *corev1.Pod) string { return p.Status.PodIP })),
			wide(text("Node", func(p *corev1.Pod) string { return p.Spec.NodeName })),
		},
	}
}

// podReason is that of a container that waits for its next start, as kubectl shows it, or else of the Pod.
func podReason(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Reason == sandbox.ReasonCrashLoop {
			return w.Reason
		}
	}
	return p.Status.Reason
}
