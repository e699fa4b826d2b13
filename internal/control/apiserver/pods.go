package apiserver

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/rest"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// podKind describes Pods as they are shown. They are not stored: each is a view of a Sandbox.
func podKind() *resource {
	r := &resource{
		gv: corev1.SchemeGroupVersion, plural: "pods", kind: "Pod", shortNames: []string{"po"}, namespaced: true,
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
	r.newObject, r.newList = object[corev1.Pod, corev1.PodList]()
	return r
}

// podREST shows each Sandbox as the Pod that a cluster would run for it, by the same name, so
// that clients of Pods find them. It is read-only.
type podREST struct {
	tableConvertor
	sandboxes *store
}

var (
	_ rest.Getter               = (*podREST)(nil)
	_ rest.Lister               = (*podREST)(nil)
	_ rest.Watcher              = (*podREST)(nil)
	_ rest.Scoper               = (*podREST)(nil)
	_ rest.SingularNameProvider = (*podREST)(nil)
	_ rest.ShortNamesProvider   = (*podREST)(nil)
)

// New implements rest.Storage.
func (p *podREST) New() runtime.Object { return p.r.newObject() }

// NewList implements rest.Lister.
func (p *podREST) NewList() runtime.Object { return p.r.newList() }

// Destroy implements rest.Storage: the Sandboxes' storage is what is destroyed.
func (p *podREST) Destroy() {}

// NamespaceScoped implements rest.Scoper.
func (p *podREST) NamespaceScoped() bool { return true }

// GetSingularName implements rest.SingularNameProvider.
func (p *podREST) GetSingularName() string { return p.r.singular() }

// ShortNames implements rest.ShortNamesProvider.
func (p *podREST) ShortNames() []string { return p.r.shortNames }

// Get implements rest.Getter.
func (p *podREST) Get(ctx context.Context, name string, opts *metav1.GetOptions) (runtime.Object, error) {
	o, err := p.sandboxes.Get(ctx, name, opts)
	if err != nil {
		return nil, err
	}
	return podOf(o.(*agents.Sandbox)), nil
}

// List implements rest.Lister.
func (p *podREST) List(ctx context.Context, opts *metainternalversion.ListOptions) (runtime.Object, error) {
	list, err := p.sandboxes.List(ctx, unselected(opts))
	if err != nil {
		return nil, err
	}
	sandboxes := list.(*agents.SandboxList)
	pods := &corev1.PodList{ListMeta: sandboxes.ListMeta, Items: []corev1.Pod{}}
	for i := range sandboxes.Items {
		pod := podOf(&sandboxes.Items[i])
		if ok, err := p.selects(opts, pod); err != nil {
			return nil, err
		} else if ok {
			pods.Items = append(pods.Items, *pod)
		}
	}
	return pods, nil
}

// Watch implements rest.Watcher. A Pod that no longer matches a selector is reported as deleted, once.
// So may be one that never matched: what the client has listed before is not known here.
func (p *podREST) Watch(ctx context.Context, opts *metainternalversion.ListOptions) (watch.Interface, error) {
	w, err := p.sandboxes.Watch(ctx, unselected(opts))
	if err != nil {
		return nil, err
	}
	out := map[types.UID]bool{} // Pods that do not match, and that the client knows not to
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
		o := e.Object
		if shared, ok := o.(runtime.CacheableObject); ok { // one event of the watch cache for several watches
			o = shared.GetObject()
		}
		s, ok := o.(*agents.Sandbox)
		if !ok {
			return e, true // an error
		}
		pod := podOf(s)
		e.Object = pod
		if e.Type == watch.Bookmark {
			return e, true
		}
		if matches, err := p.selects(opts, pod); err == nil && matches {
			delete(out, s.UID)
			return e, true
		}
		report := e.Type != watch.Added && !out[s.UID]
		if out[s.UID] = true; e.Type == watch.Deleted {
			delete(out, s.UID)
		}
		e.Type = watch.Deleted
		return e, report
	}), nil
}

// unselected leaves the selectors out: a Pod has labels and fields that its Sandbox has not.
func unselected(opts *metainternalversion.ListOptions) *metainternalversion.ListOptions {
	if opts == nil {
		return nil
	}
	all := opts.DeepCopy()
	all.LabelSelector, all.FieldSelector = nil, nil
	return all
}

func (p *podREST) selects(opts *metainternalversion.ListOptions, pod *corev1.Pod) (bool, error) {
	if opts == nil {
		return true, nil
	}
	labels, fields, err := p.r.attributes(pod)
	if err != nil {
		return false, err
	}
	byLabel := opts.LabelSelector == nil || opts.LabelSelector.Matches(labels)
	return byLabel && (opts.FieldSelector == nil || opts.FieldSelector.Matches(fields)), nil
}

// podOf makes the view of a Sandbox.
func podOf(s *agents.Sandbox) *corev1.Pod {
	controller := true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion,
			CreationTimestamp: s.CreationTimestamp, DeletionTimestamp: s.DeletionTimestamp,
			Labels:      merged(s.Spec.PodTemplate.ObjectMeta.Labels, s.Labels),
			Annotations: merged(s.Spec.PodTemplate.ObjectMeta.Annotations, s.Annotations),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: agents.GroupVersion.String(), Kind: "Sandbox", Name: s.Name, UID: s.UID, Controller: &controller,
			}},
		},
		Spec: *s.Spec.PodTemplate.Spec.DeepCopy(),
	}
	delete(pod.Annotations, corev1.LastAppliedConfigAnnotation) // it is the Sandbox's
	pod.Spec.NodeName = s.Status.NodeName
	pod.Status = podStatus(s)
	return pod
}

func podStatus(s *agents.Sandbox) corev1.PodStatus {
	phase, isReady := sandbox.PhaseOf(s), ready(s.Status.Conditions)
	status := corev1.PodStatus{Phase: podPhase(s, phase), Reason: string(phase), Message: isReady.Message, StartTime: &s.CreationTimestamp}
	for _, ip := range s.Status.PodIPs {
		status.PodIPs = append(status.PodIPs, corev1.PodIP{IP: ip})
	}
	if len(s.Status.PodIPs) > 0 {
		status.PodIP = s.Status.PodIPs[0]
	}
	condition := corev1.PodCondition{
		Type: corev1.PodReady, Status: corev1.ConditionStatus(isReady.Status), Reason: isReady.Reason,
		Message: isReady.Message, LastTransitionTime: isReady.LastTransitionTime,
	}
	if condition.Status == "" {
		condition.Status = corev1.ConditionFalse
	}
	status.Conditions = []corev1.PodCondition{condition}
	running := phase == sandbox.Running
	for _, c := range s.Spec.PodTemplate.Spec.Containers {
		cs := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: running, Started: &running}
		if running {
			cs.State.Running = &corev1.ContainerStateRunning{StartedAt: isReady.LastTransitionTime}
		} else {
			cs.State.Waiting = &corev1.ContainerStateWaiting{Reason: string(phase), Message: isReady.Message}
		}
		status.ContainerStatuses = append(status.ContainerStatuses, cs)
	}
	return status
}

// podPhase is what clients go by: kubectl forwards ports of Pods that run only, and runs no
// command in one that has ended. A paused sandbox that traffic resumes counts as running.
func podPhase(s *agents.Sandbox, phase sandbox.Phase) corev1.PodPhase {
	b := s.Spec.Barchan
	switch {
	case phase == sandbox.Dead && meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionFinished) &&
		condition(s.Status.Conditions, agents.ConditionFinished).Reason == agents.ReasonPodSucceeded:
		return corev1.PodSucceeded
	case phase == sandbox.Dead:
		return corev1.PodFailed
	case phase == sandbox.Running, phase == sandbox.Stopping, phase == sandbox.Resuming:
		return corev1.PodRunning
	case phase == sandbox.Paused && b != nil && b.Wake != nil && b.Wake.OnTraffic:
		return corev1.PodRunning
	}
	return corev1.PodPending
}

func merged(below, above map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, below)
	maps.Copy(all, above)
	return all
}
