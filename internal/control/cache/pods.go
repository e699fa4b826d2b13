package cache

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// PodsOf returns the Pods that a sandbox controls, without managed fields, environment and volumes. The cache shares them: the
// caller must not change them.
func (c *Cache) PodsOf(ctx context.Context, owner types.UID) ([]*corev1.Pod, error) {
	return shared[*corev1.Pod](ctx, c, indexPodOwner, string(owner))
}

// podSelection restricts the cache to the Pods of sandboxes, also those that agent-sandbox made, and to what is read of them.
func podSelection() crcache.ByObject {
	return crcache.ByObject{Label: having(agents.LabelSandboxNameHash), Transform: trimPod}
}

// serviceSelection restricts the cache to the Services of sandboxes.
func serviceSelection() crcache.ByObject {
	return crcache.ByObject{Label: having(agents.LabelSandboxNameHash)}
}

// ourSelection restricts the cache to what a controller of ours has written.
func ourSelection() crcache.ByObject { return crcache.ByObject{Label: having(sandbox.LabelPolicy)} }

func having(label string) labels.Selector {
	exists, err := labels.NewRequirement(label, selection.Exists, nil)
	if err != nil {
		panic(err) // a constant
	}
	return labels.NewSelector().Add(*exists)
}

func trimPod(o any) (any, error) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	pod.ManagedFields, pod.Annotations = nil, nil
	pod.Spec.Volumes, pod.Spec.InitContainers = nil, nil
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		*c = corev1.Container{Name: c.Name, Image: c.Image}
	}
	return pod, nil
}
