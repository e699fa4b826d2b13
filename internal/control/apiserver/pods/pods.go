// Package pods shows each Sandbox as the Pod that a cluster would run for it, and serves the
// streams of Pods: exec, logs and port-forward.
//
// It stores nothing and authorizes no request: Pods are read-only views of the Sandboxes' storage,
// and a [Runtime] does the work in sandboxes. It has no locks.
package pods

import (
	"cmp"
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
)

// Sandboxes is the storage of Sandboxes.
type Sandboxes interface {
	rest.Getter
	rest.Lister
	rest.Watcher
}

// Storage returns the storage of Pods and of their subresources by path.
func Storage(sandboxes Sandboxes, r Runtime) map[string]rest.Storage {
	kind := kinds.Pods()
	all := map[string]rest.Storage{kind.Plural: &view{kind, sandboxes}}
	for name, s := range streams(sandboxes, r) {
		all[kind.Plural+"/"+name] = s
	}
	return all
}

// view shows each Sandbox as a Pod of the same name. It is read-only.
type view struct {
	*kinds.Resource
	sandboxes Sandboxes
}

var (
	_ rest.Getter               = (*view)(nil)
	_ rest.Lister               = (*view)(nil)
	_ rest.Watcher              = (*view)(nil)
	_ rest.Scoper               = (*view)(nil)
	_ rest.SingularNameProvider = (*view)(nil)
	_ rest.ShortNamesProvider   = (*view)(nil)
	_ rest.TableConvertor       = (*view)(nil)
)

// Destroy implements rest.Storage; the Sandboxes' storage is the one to destroy.
func (p *view) Destroy() {}

func (p *view) NamespaceScoped() bool { return true }

func (p *view) ShortNames() []string { return p.Resource.ShortNames }

func (p *view) Get(ctx context.Context, name string, opts *metav1.GetOptions) (runtime.Object, error) {
	o, err := p.sandboxes.Get(ctx, name, opts)
	if err != nil {
		return nil, err
	}
	return podFor(o.(*agents.Sandbox)), nil
}

func (p *view) List(ctx context.Context, opts *metainternalversion.ListOptions) (runtime.Object, error) {
	list, err := p.sandboxes.List(ctx, unselected(opts))
	if err != nil {
		return nil, err
	}
	sandboxes := list.(*agents.SandboxList)
	pods := &corev1.PodList{ListMeta: sandboxes.ListMeta, Items: []corev1.Pod{}}
	for i := range sandboxes.Items {
		pod := podFor(&sandboxes.Items[i])
		if ok, err := p.selects(opts, pod); err != nil {
			return nil, err
		} else if ok {
			pods.Items = append(pods.Items, *pod)
		}
	}
	return pods, nil
}

// Watch implements rest.Watcher. A Pod that no longer matches a selector is reported as deleted, once.
// So may be one that never matched, since the client's earlier list is unknown.
func (p *view) Watch(ctx context.Context, opts *metainternalversion.ListOptions) (watch.Interface, error) {
	w, err := p.sandboxes.Watch(ctx, unselected(opts))
	if err != nil {
		return nil, err
	}
	out := map[types.UID]bool{} // Pods that do not match, and that were reported so
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
		o := e.Object
		if shared, ok := o.(runtime.CacheableObject); ok { // one event of the watch cache for several watches
			o = shared.GetObject()
		}
		s, ok := o.(*agents.Sandbox)
		if !ok {
			return e, true // an error
		}
		pod := podFor(s)
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

// unselected removes the selectors: a Pod has labels and fields that its Sandbox lacks.
func unselected(opts *metainternalversion.ListOptions) *metainternalversion.ListOptions {
	if opts == nil {
		return nil
	}
	all := opts.DeepCopy()
	all.LabelSelector, all.FieldSelector = nil, nil
	return all
}

func (p *view) selects(opts *metainternalversion.ListOptions, pod *corev1.Pod) (bool, error) {
	if opts == nil {
		return true, nil
	}
	labels, fields, err := p.Attributes(pod)
	if err != nil {
		return false, err
	}
	byLabel := opts.LabelSelector == nil || opts.LabelSelector.Matches(labels)
	return byLabel && (opts.FieldSelector == nil || opts.FieldSelector.Matches(fields)), nil
}

// podFor returns the Pod of a Sandbox.
func podFor(s *agents.Sandbox) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: s.Name, UID: s.UID, ResourceVersion: s.ResourceVersion,
			CreationTimestamp: s.CreationTimestamp, DeletionTimestamp: s.DeletionTimestamp,
			Labels:      merged(s.Spec.PodTemplate.ObjectMeta.Labels, s.Labels),
			Annotations: merged(s.Spec.PodTemplate.ObjectMeta.Annotations, s.Annotations),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: agents.GroupVersion.String(), Kind: "Sandbox", Name: s.Name, UID: s.UID, Controller: new(true),
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
	phase, isReady := sandbox.PhaseOf(s), condition(s, agents.ConditionReady)
	status := corev1.PodStatus{Phase: podPhase(s, phase), Reason: string(phase), Message: isReady.Message, StartTime: &s.CreationTimestamp}
	for _, ip := range s.Status.PodIPs {
		status.PodIPs = append(status.PodIPs, corev1.PodIP{IP: ip})
	}
	if len(s.Status.PodIPs) > 0 {
		status.PodIP = s.Status.PodIPs[0]
	}
	status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodReady, Status: cmp.Or(corev1.ConditionStatus(isReady.Status), corev1.ConditionFalse), Reason: isReady.Reason,
		Message: isReady.Message, LastTransitionTime: isReady.LastTransitionTime,
	}}
	status.ContainerStatuses = containerStatuses(s, phase, isReady)
	return status
}

func containerStatuses(s *agents.Sandbox, phase sandbox.Phase, isReady metav1.Condition) (all []corev1.ContainerStatus) {
	running := phase == sandbox.Running
	for i, c := range s.Spec.PodTemplate.Spec.Containers {
		cs := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: running, Started: &running}
		if seen := seenOf(s, c.Name); i > 0 && seen != nil && (running || phase == sandbox.Starting) {
			cs.Ready, cs.RestartCount, cs.ImageID, cs.State, cs.LastTerminationState = seen.Ready, seen.RestartCount, seen.Image, seen.State, seen.LastState
			cs.Started = new(seen.State.Running != nil)
		} else if running {
			cs.State.Running = &corev1.ContainerStateRunning{StartedAt: isReady.LastTransitionTime}
		} else {
			cs.State.Waiting = &corev1.ContainerStateWaiting{Reason: string(phase), Message: isReady.Message}
		}
		all = append(all, cs)
	}
	return all
}

// seenOf is the reported state of a container besides the first; nil if there is none.
func seenOf(s *agents.Sandbox, name string) *agents.ContainerStatus {
	if s.Status.Barchan == nil {
		return nil
	}
	for i := range s.Status.Barchan.Containers {
		if c := &s.Status.Barchan.Containers[i]; c.Name == name {
			return c
		}
	}
	return nil
}

// podPhase returns the phase that clients act on: kubectl forwards ports of running Pods only, and
// runs no command in an ended one. A paused sandbox that traffic resumes counts as running.
func podPhase(s *agents.Sandbox, phase sandbox.Phase) corev1.PodPhase {
	b := s.Spec.Barchan
	switch {
	case phase == sandbox.Dead:
		if c := condition(s, agents.ConditionFinished); c.Status == metav1.ConditionTrue && c.Reason == agents.ReasonPodSucceeded {
			return corev1.PodSucceeded
		}
		return corev1.PodFailed
	case phase == sandbox.Running, phase == sandbox.Stopping, phase == sandbox.Resuming:
		return corev1.PodRunning
	case phase == sandbox.Paused && b != nil && b.Wake != nil && b.Wake.OnTraffic:
		return corev1.PodRunning
	}
	return corev1.PodPending
}

// condition returns a condition of a Sandbox, or an empty one.
func condition(s *agents.Sandbox, kind string) metav1.Condition {
	return ptr.Deref(meta.FindStatusCondition(s.Status.Conditions, kind), metav1.Condition{})
}

func merged(below, above map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, below)
	maps.Copy(all, above)
	return all
}
