package podrun

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/controllers/placement"
)

// TestNodeOfPendingPod: the node of a Pod that starts without trouble makes no status of its own. One that a status has already is
// kept up to date.
func TestNodeOfPendingPod(t *testing.T) {
	r := newRunner(Config{Placer: &placement.Placer{}})
	waits := corev1.ContainerStatus{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull"}}}
	for name, tt := range map[string]struct {
		known, message, want string
		containers           []corev1.ContainerStatus
	}{
		"first start": {message: "Pod exists with phase: Pending"},
		"next start":  {known: "a", message: "Pod exists with phase: Pending", want: "b"},
		"trouble":     {message: "container main: ErrImagePull", want: "b", containers: []corev1.ContainerStatus{waits}},
	} {
		s, pod := &agents.Sandbox{}, &corev1.Pod{}
		s.Status.NodeName = tt.known
		pod.Spec.NodeName, pod.Status.Phase, pod.Status.ContainerStatuses = "b", corev1.PodPending, tt.containers
		seen := r.observed(s, []*corev1.Pod{pod})
		if seen.State != sandbox.ContainerPending || seen.Node != tt.want || seen.Message != tt.message || seen.Progressing == (name == "trouble") {
			t.Errorf("%s: node %q, message %q in state %v, progressing %v", name, seen.Node, seen.Message, seen.State, seen.Progressing)
		}
	}
}

// TestLastingTrouble: clients are told not to wait for an image that cannot be pulled, or for a Secret that is missing.
func TestLastingTrouble(t *testing.T) {
	r := newRunner(Config{Placer: &placement.Placer{}})
	for waits, want := range map[string]string{
		"ErrImagePull": "", "ImagePullBackOff": "ImageUnavailable", "InvalidImageName": "ImageUnavailable", "ErrImageNeverPull": "ImageUnavailable",
		"CreateContainerConfigError": "CreateContainerConfigError", "CreateContainerError": "", "ContainerCreating": "",
	} {
		pod := &corev1.Pod{}
		pod.Status.Phase = corev1.PodPending
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: waits}}}}
		if got := r.observed(&agents.Sandbox{}, []*corev1.Pod{pod}).Reason; got != want {
			t.Errorf("%s: reason %q, want %q", waits, got, want)
		}
	}
}

// TestEndOfPod: a sandbox that has ended says which of its containers failed, and why. Its exit code is that of its first container, and
// no success where another one failed.
func TestEndOfPod(t *testing.T) {
	r := newRunner(Config{Placer: &placement.Placer{}})
	ended := func(name string, code int32, reason, message string) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: name, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason, Message: message}}}
	}
	for name, tt := range map[string]struct {
		phase      corev1.PodPhase
		init, main corev1.ContainerStatus
		second     corev1.ContainerStatus
		want       string
		code       *int32
	}{
		"memory":         {corev1.PodFailed, ended("fetch", 0, "Completed", ""), ended("main", 137, "OOMKilled", ""), ended("second", 0, "Completed", ""), "Pod failed: container main ended with code 137 (OOMKilled)", new(int32(137))},
		"plain":          {corev1.PodFailed, ended("fetch", 0, "Completed", ""), ended("main", 3, "Error", ""), ended("second", 0, "Completed", ""), "Pod failed: container main ended with code 3", new(int32(3))},
		"no program":     {corev1.PodFailed, ended("fetch", 0, "Completed", ""), ended("main", 128, "StartError", "no such file\n"), ended("second", 0, "Completed", ""), "Pod failed: container main ended with code 128 (StartError): no such file", new(int32(128))},
		"another":        {corev1.PodFailed, ended("fetch", 0, "Completed", ""), ended("main", 0, "Completed", ""), ended("second", 2, "Error", ""), "Pod failed: container second ended with code 2", nil},
		"init container": {corev1.PodFailed, ended("fetch", 1, "Error", "no network"), corev1.ContainerStatus{Name: "main"}, corev1.ContainerStatus{Name: "second"}, "Pod failed: container fetch ended with code 1: no network", nil},
		"success":        {corev1.PodSucceeded, ended("fetch", 0, "Completed", ""), ended("main", 0, "Completed", ""), ended("second", 0, "Completed", ""), "Pod completed successfully", new(int32(0))},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}, {Name: "second"}}}}
		pod.Status = corev1.PodStatus{Phase: tt.phase, InitContainerStatuses: []corev1.ContainerStatus{tt.init}, ContainerStatuses: []corev1.ContainerStatus{tt.main, tt.second}}
		seen := r.observed(&agents.Sandbox{}, []*corev1.Pod{pod})
		if seen.State != sandbox.ContainerExited || seen.Message != tt.want || !ptr.Equal(seen.EntrypointExit, tt.code) {
			t.Errorf("%s: %q with code %v in state %v, want %q with %v", name, seen.Message, seen.EntrypointExit, seen.State, tt.want, tt.code)
		}
	}
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	last := ended("main", 137, "OOMKilled", "a message that the state has too")
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off 10s"}}, LastTerminationState: last.State,
	}}
	if seen, want := r.observed(&agents.Sandbox{}, []*corev1.Pod{pod}), "container main: CrashLoopBackOff: back-off 10s; its last run ended with code 137 (OOMKilled)"; seen.Message != want {
		t.Errorf("message %q, want %q", seen.Message, want)
	}
}

// TestScheduledOfPod: the Pod's condition is passed on.
func TestScheduledOfPod(t *testing.T) {
	r := newRunner(Config{Placer: &placement.Placer{}})
	pod := &corev1.Pod{}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1"}}
	if c := r.observed(&agents.Sandbox{}, []*corev1.Pod{pod}).PodScheduled; c == nil || c.Message != "0/1" {
		t.Errorf("PodScheduled is %+v", c)
	}
}

// lagging is a cache that shows no Pod yet.
type lagging struct{ Cache }

func (lagging) PodsOf(context.Context, types.UID) ([]*corev1.Pod, error) { return nil, nil }

// TestPlacedPod: a Pod that was created is known before the cache shows it, to its sandbox alone, until its events come.
func TestPlacedPod(t *testing.T) {
	r := newRunner(Config{Cache: lagging{}})
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "s", UID: "s"}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "p", ResourceVersion: "5", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(s, agents.GroupVersion.WithKind("Sandbox"))}}}
	count := func(owner types.UID) int {
		pods, err := r.pods(t.Context(), owner)
		if err != nil {
			t.Fatal(err)
		}
		return len(pods)
	}
	r.placed.Assume(t.Context(), pod)
	if count("s") != 1 || count("other") != 0 {
		t.Error("the new Pod is not its sandbox's")
	}
	r.placed.Observe(nil, pod)
	if count("s") != 0 {
		t.Error("the Pod is assumed although the cache shows it, or that it is gone")
	}
}
