package podrun

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// reasonDeletionByPodGC is of the condition DisruptionTarget; package k8s.io/api does not have it.
const reasonDeletionByPodGC = "DeletionByPodGC"

// read returns a sandbox with its Pods.
func (r *Runner) read(ctx context.Context, ref sandbox.Ref) (*agents.Sandbox, []*corev1.Pod, error) {
	s, err := r.cfg.Cache.Sandbox(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name})
	if err != nil {
		return nil, nil, err
	}
	if s.UID != ref.UID {
		return nil, nil, fmt.Errorf("sandbox %s/%s was made again: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	}
	pods, err := r.pods(ctx, s.UID)
	return s, pods, err
}

// pods returns the Pods of a sandbox, the oldest first.
func (r *Runner) pods(ctx context.Context, owner types.UID) ([]*corev1.Pod, error) {
	pods, err := r.cfg.Cache.PodsOf(ctx, owner)
	if err != nil {
		return nil, fmt.Errorf("read the Pods of a sandbox: %w", err)
	}
	pods = r.placed.Merge(pods, func(pod *corev1.Pod) bool { return metav1.GetControllerOf(pod).UID == owner })
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	return pods, nil
}

// observed returns the state of a sandbox with these Pods. The texts are upstream's where it has any, for its clients compare them.
func (r *Runner) observed(s *agents.Sandbox, pods []*corev1.Pod) sandbox.Observed {
	seen := sandbox.Observed{State: sandbox.ContainerAbsent, Message: "Pod has been terminated. Sandbox is suspended"}
	seen.Service, seen.ServiceFQDN = r.cfg.Placer.Service(s)
	switch {
	case len(pods) == 0:
		return seen
	case len(pods) > 1:
		seen.State, seen.Reason = sandbox.ContainerPending, agents.ReasonMultiplePods
		seen.Message = fmt.Sprintf("it owns %d Pods, of which none is touched: %s", len(pods), names(pods))
		return seen
	}
	pod := pods[0]
	seen.Node, seen.Runtime, seen.Image = pod.Spec.NodeName, runtimeOf(pod), imageOf(pod)
	seen.Address, _ = netip.ParseAddr(pod.Status.PodIP) // invalid without one
	seen.PodScheduled = condition(pod, corev1.PodScheduled)
	switch {
	case pod.DeletionTimestamp != nil, isCollected(pod): // its containers may have ended by now, which is no end of the sandbox
		seen.State, seen.Reason, seen.Message = sandbox.ContainerPending, agents.ReasonPodTerminating, "Pod is terminating. Sandbox is suspending"
		if s.Spec.OperatingMode != agents.ModeSuspended {
			seen.Message = "Pod is terminating"
		}
	case pod.Status.Phase == corev1.PodSucceeded, pod.Status.Phase == corev1.PodFailed:
		seen.State, seen.Message = sandbox.ContainerExited, endOf(pod)
		if code := exitCode(pod); pod.Status.Phase == corev1.PodSucceeded || code != nil && *code != 0 { // else another container has failed
			seen.EntrypointExit = code
		}
	case pod.Status.Phase == corev1.PodRunning && r.prepared(s, pod):
		seen.State, seen.StartedAt, seen.Probed = sandbox.ContainerRunning, startOf(pod), isReady(pod)
		seen.Message = "Pod is Ready"
		if !seen.Probed {
			_, trouble := troubleOf(pod)
			seen.Message = cmp.Or(trouble, "Pod is Running but not Ready")
		} else if seen.Service != "" {
			seen.Message = "Pod is Ready; Service Exists"
		}
	default:
		seen.State = sandbox.ContainerPending
		seen.Reason, seen.Message = troubleOf(pod)
		if seen.Progressing = seen.Message == ""; seen.Progressing {
			seen.Message = fmt.Sprintf("Pod exists with phase: %s", cmp.Or(pod.Status.Phase, corev1.PodPending))
			if s.Status.NodeName == "" { // a Pod without trouble runs soon, and the status of that has the node
				seen.Node = ""
			}
		}
	}
	return seen
}

func names(pods []*corev1.Pod) string {
	all := make([]string, len(pods))
	for i, p := range pods {
		all[i] = p.Name
	}
	return strings.Join(all, ", ")
}

// hasAgent reports whether a Pod has an agent. One that agent-sandbox made, before its cluster was taken over, has none.
func hasAgent(pod *corev1.Pod) bool { return pod.Labels[sandbox.LabelID] != "" }

// isCollected reports whether the garbage collector of Pods is about to delete a Pod, as where its node is gone: it lets the Pod fail first.
func isCollected(pod *corev1.Pod) bool {
	c := condition(pod, corev1.DisruptionTarget)
	return c != nil && c.Status == corev1.ConditionTrue && c.Reason == reasonDeletionByPodGC
}

// prepared reports whether the agent of the Pod's running container, if the Pod has one, has accepted the sandbox's token.
func (r *Runner) prepared(s *agents.Sandbox, pod *corev1.Pod) bool {
	start := startOf(pod)
	if !hasAgent(pod) {
		return !start.IsZero()
	}
	if start.IsZero() || s.Status.Barchan == nil || s.Status.Barchan.StartedAt == nil || !s.Status.Barchan.StartedAt.Time.Equal(start) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	last, known := r.bound[client.ObjectKeyFromObject(s)]
	return !known || last.run == runOf(pod) // another process has written what this one does not know
}

func runOf(pod *corev1.Pod) run {
	now := run{pod: pod.UID}
	if c := firstContainer(pod); c != nil {
		now.restarts = c.RestartCount
	}
	return now
}

// startOf returns when the container with the agent started; zero while it does not run.
func startOf(pod *corev1.Pod) time.Time {
	if c := firstContainer(pod); c != nil && c.State.Running != nil {
		return c.State.Running.StartedAt.Time
	}
	return time.Time{}
}

// firstContainer returns the status of the container with the agent.
func firstContainer(pod *corev1.Pod) *corev1.ContainerStatus {
	for i := range pod.Status.ContainerStatuses {
		if c := &pod.Status.ContainerStatuses[i]; len(pod.Spec.Containers) > 0 && c.Name == pod.Spec.Containers[0].Name {
			return c
		}
	}
	return nil
}

func isReady(pod *corev1.Pod) bool {
	c := condition(pod, corev1.PodReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

func condition(pod *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == kind {
			return c
		}
	}
	return nil
}

// troubleOf returns why a Pod does not get ready, in Kubernetes' words: it is not scheduled, or a container waits for what it
// cannot get. The text is empty without trouble. The reason is not where clients should not wait for the end of the trouble.
func troubleOf(pod *corev1.Pod) (reason, text string) {
	if c := condition(pod, corev1.PodScheduled); c != nil && c.Status == corev1.ConditionFalse {
		return "", strings.Join(nonEmpty(c.Reason, c.Message), ": ")
	}
	for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, c := range list {
			if w := c.State.Waiting; w != nil && w.Reason != "PodInitializing" && w.Reason != "ContainerCreating" {
				text = fmt.Sprintf("container %s: %s", c.Name, strings.Join(nonEmpty(w.Reason, w.Message), ": "))
				if last := c.LastTerminationState.Terminated; last != nil { // such as for its memory, which a back-off does not say
					text += "; its last run ended with " + exitCodeText(last)
				}
				return lastingReasons[w.Reason], text
			}
		}
	}
	return "", strings.Join(nonEmpty(pod.Status.Reason, pod.Status.Message), ": ") // of a node that is lost
}

// lastingReasons are the reasons of condition Ready by those of a container that waits for a change by somebody. A kubelet
// tries to get an image once more before it says ImagePullBackOff.
var lastingReasons = map[string]string{
	"ImagePullBackOff": sandbox.ReasonImage, "InvalidImageName": sandbox.ReasonImage, "ErrImageNeverPull": sandbox.ReasonImage,
	podsource.ReasonConfig: podsource.ReasonConfig,
}

// endOf returns why a Pod has ended.
func endOf(pod *corev1.Pod) string {
	if text := strings.Join(nonEmpty(pod.Status.Reason, pod.Status.Message), ": "); text != "" {
		return text // such as an eviction
	}
	if pod.Status.Phase == corev1.PodSucceeded {
		return "Pod completed successfully"
	}
	for _, list := range [][]corev1.ContainerStatus{pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses} {
		for _, c := range list {
			if t := c.State.Terminated; t != nil && t.ExitCode != 0 {
				return fmt.Sprintf("Pod failed: container %s ended with %s", c.Name, exitText(t))
			}
		}
	}
	return "Pod failed"
}

// exitText returns how a container ended, with the message that the kubelet has of it.
func exitText(t *corev1.ContainerStateTerminated) string {
	return strings.Join(nonEmpty(exitCodeText(t), strings.TrimSpace(t.Message)), ": ")
}

// exitCodeText returns a container's exit code, with the kubelet's reason where that says more, such as OOMKilled.
func exitCodeText(t *corev1.ContainerStateTerminated) string {
	text := fmt.Sprintf("code %d", t.ExitCode)
	if t.Reason != "" && t.Reason != "Error" && t.Reason != "Completed" {
		text += fmt.Sprintf(" (%s)", t.Reason)
	}
	return text
}

func nonEmpty(all ...string) []string {
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

func exitCode(pod *corev1.Pod) *int32 {
	if c := firstContainer(pod); c != nil && c.State.Terminated != nil {
		return &c.State.Terminated.ExitCode
	}
	return nil
}

func imageOf(pod *corev1.Pod) string {
	if c := firstContainer(pod); c != nil {
		return c.ImageID
	}
	return ""
}

// runtimeOf returns the RuntimeClass, or what CRI runtimes run without one.
func runtimeOf(pod *corev1.Pod) string {
	if pod.Spec.RuntimeClassName != nil {
		return *pod.Spec.RuntimeClassName
	}
	return agents.RuntimeRunc
}
