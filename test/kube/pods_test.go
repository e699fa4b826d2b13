package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/placement"
	"github.com/barchan-dev/barchan/internal/control/controllers/podrun"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/running"
)

const podNode = "n1"

// podTest is a namespace of a real API server where the controller of sandboxes runs them as Pods. The test is the
// scheduler, the kubelet and the agents; TestPodsOfAKubelet has the real ones.
type podTest struct {
	*testing.T
	client.Client
	namespace string
	tokens    *sandbox.Tokens

	mu    sync.Mutex
	inits map[types.UID][]envd.InitRequest // +checklocks:mu
	deaf  bool                             // agents do not answer; +checklocks:mu
}

func startPods(t *testing.T) *podTest {
	t.Helper()
	cfg := podKube.start(t)
	c, err := cache.New(t.Context(), cache.Config{REST: cfg, Kinds: cache.ControllerKinds(), Trim: true})
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	p := &podTest{T: t, Client: newClient(t, cfg), tokens: tokens, inits: map[types.UID][]envd.InitRequest{}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "pods-"}}
	if err := p.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	p.namespace = ns.Name
	// The controller that makes it does not run here, and Pods need it.
	if err := p.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "default"}}); err != nil {
		t.Fatal(err)
	}
	placer, err := placement.New(placement.Config{Client: c.Live(), Cache: c.Informers(), Tokens: tokens, AgentImage: "agent:1", Namespace: "roles"})
	if err != nil {
		t.Fatal(err)
	}
	runner, err := podrun.New(podrun.Config{Cache: c, Placer: placer, Agents: p, Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	controller, err := controllers.NewSandbox(controllers.SandboxConfig{
		Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Runner: runner, Sources: runner.Changes(c.Informers()),
	})
	if err != nil {
		t.Fatal(err)
	}
	stop := running.Over(t, c, controller.Start)
	t.Cleanup(stop)
	return p
}

// Bind is the agents'.
func (p *podTest) Bind(_ context.Context, s *agents.Sandbox, req envd.InitRequest) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.deaf {
		return fmt.Errorf("no agent at %v", s.Status.PodIPs)
	}
	p.inits[s.UID] = append(p.inits[s.UID], req)
	return nil
}

func (p *podTest) requests(s *agents.Sandbox) []envd.InitRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.inits[s.UID])
}

// sandbox creates one as upstream's clients do, without anything of ours in it.
func (p *podTest) sandbox(name string, changes ...func(*agents.Sandbox)) *agents.Sandbox {
	p.Helper()
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: name}}
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "image:1"}}
	for _, change := range changes {
		change(s)
	}
	if err := p.Create(p.Context(), s); err != nil {
		p.Fatal(err)
	}
	return s
}

func (p *podTest) pod(s *agents.Sandbox) *corev1.Pod {
	p.Helper()
	pod := &corev1.Pod{}
	eventually.NoError(p, "a Pod of "+s.Name, func() error { return p.Get(p.Context(), client.ObjectKeyFromObject(s), pod) })
	return pod
}

// run is what the scheduler and the kubelet do to a Pod.
func (p *podTest) run(pod *corev1.Pod, address string, change ...func(*corev1.PodStatus)) {
	p.Helper()
	if pod.Spec.NodeName == "" {
		binding := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: podNode}}
		if err := p.SubResource("binding").Create(p.Context(), pod, binding); err != nil {
			p.Fatal(err)
		}
	}
	p.setStatus(pod, append([]func(*corev1.PodStatus){func(s *corev1.PodStatus) {
		*s = corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: address, PodIPs: []corev1.PodIP{{IP: address}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}},
			ContainerStatuses: []corev1.ContainerStatus{{
				Name: "main", Image: "image:1", ImageID: "sha256:1", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(time.Now().Truncate(time.Second))}},
			}},
		}
	}}, change...)...)
}

func (p *podTest) setStatus(pod *corev1.Pod, change ...func(*corev1.PodStatus)) {
	p.Helper()
	if err := p.Get(p.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
		p.Fatal(err)
	}
	for _, c := range change {
		c(&pod.Status)
	}
	if err := p.Status().Update(p.Context(), pod); err != nil {
		p.Fatal(err)
	}
}

// end is what the kubelet does to a Pod that is being deleted.
func (p *podTest) end(pod *corev1.Pod) {
	p.Helper()
	eventually.True(p, "deletion of Pod "+pod.Name, func() bool {
		err := p.Get(p.Context(), client.ObjectKeyFromObject(pod), pod)
		return apierrors.IsNotFound(err) || err == nil && pod.DeletionTimestamp != nil
	})
	if err := p.Delete(p.Context(), pod, client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
		p.Fatal(err)
	}
}

// await waits for a condition with a text, and returns the sandbox.
func (p *podTest) await(s *agents.Sandbox, kind string, status metav1.ConditionStatus, reason, text string) *agents.Sandbox {
	p.Helper()
	now := &agents.Sandbox{}
	eventually.NoError(p, fmt.Sprintf("%s of %s", kind, s.Name), func() error {
		if err := p.Get(p.Context(), client.ObjectKeyFromObject(s), now); err != nil {
			return err
		}
		c := meta.FindStatusCondition(now.Status.Conditions, kind)
		if c == nil || c.Status != status || c.Reason != reason || !strings.Contains(c.Message, text) {
			return fmt.Errorf("%+v, want %s %s %q", now.Status.Conditions, status, reason, text)
		}
		return nil
	})
	return now
}

func (p *podTest) ready(s *agents.Sandbox, text string) *agents.Sandbox {
	p.Helper()
	return p.await(s, agents.ConditionReady, metav1.ConditionTrue, agents.ReasonDependenciesReady, text)
}

func (p *podTest) update(s *agents.Sandbox, change func(*agents.Sandbox)) {
	p.Helper()
	eventually.NoError(p, "update of "+s.Name, func() error {
		if err := p.Get(p.Context(), client.ObjectKeyFromObject(s), s); err != nil {
			return err
		}
		change(s)
		return p.Update(p.Context(), s)
	})
}

func withVolume(s *agents.Sandbox) {
	claim := agents.PersistentVolumeClaimTemplate{}
	claim.Name, claim.Spec.AccessModes = "data", []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{claim}
}

func withService(s *agents.Sandbox) { s.Spec.Service = new(true) }

func TestPodOfASandbox(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("whole", withService, func(s *agents.Sandbox) {
		s.Spec.PodTemplate.ObjectMeta = agents.PodMetadata{Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "1"}}
		s.Spec.PodTemplate.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "$(A)"}}
		s.Spec.PodTemplate.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"own", "hook"}}}}
		s.Spec.PodTemplate.Spec.Containers = append(s.Spec.PodTemplate.Spec.Containers, corev1.Container{Name: "second", Image: "image:2"})
		claim := agents.PersistentVolumeClaimTemplate{}
		claim.Name, claim.Labels = "data", map[string]string{"of": "claim"}
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{claim}
	})
	pod := p.pod(s)
	p.checkPod(s, pod)
	p.checkOthers(s, pod)
	p.checkRun(s, pod)
	// What a claim adds reaches the agent, and a container that starts again gets all of it.
	p.update(s, func(s *agents.Sandbox) {
		env := &s.Spec.PodTemplate.Spec.Containers[0].Env
		*env = append(*env, corev1.EnvVar{Name: "CLAIM", Value: "2"})
	})
	eventually.True(t, "the claim's variable", func() bool {
		inits := p.requests(s)
		return inits[len(inits)-1].EnvVars["CLAIM"] == "2"
	})
	before := len(p.requests(s))
	p.setStatus(pod, func(st *corev1.PodStatus) {
		st.ContainerStatuses[0].RestartCount++
		st.ContainerStatuses[0].State.Running.StartedAt = metav1.NewTime(time.Now().Add(2 * time.Second).Truncate(time.Second))
	})
	eventually.True(t, "the restarted agent", func() bool {
		inits := p.requests(s)
		return len(inits) > before && inits[len(inits)-1].EnvVars["CLAIM"] == "2"
	})
	p.ready(s, "Pod is Ready")
}

// checkOwned has an object be the sandbox's, and bear its labels.
func (p *podTest) checkOwned(s *agents.Sandbox, o client.Object) {
	p.Helper()
	if err := p.Get(p.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		p.Fatal(err)
	}
	refs := o.GetOwnerReferences()
	if len(refs) != 1 || refs[0].UID != s.UID || refs[0].Kind != "Sandbox" || !*refs[0].Controller || !*refs[0].BlockOwnerDeletion {
		p.Errorf("%T is owned by %+v", o, refs)
	}
	if got := o.GetLabels(); got[sandbox.LabelID] != string(sandbox.IDOf(s.UID)) || got[agents.LabelSandboxNameHash] != sandbox.NameHash(s.Name) {
		p.Errorf("%T has labels %v", o, got)
	}
}

func (p *podTest) checkPod(s *agents.Sandbox, pod *corev1.Pod) {
	p.Helper()
	id := string(sandbox.IDOf(s.UID))
	p.checkOwned(s, pod)
	if pod.Labels["l"] != "1" || pod.Annotations["a"] != "1" || pod.Spec.AutomountServiceAccountToken == nil || *pod.Spec.AutomountServiceAccountToken {
		p.Errorf("Pod %+v", pod)
	}
	text, err := json.Marshal(pod)
	if err != nil || strings.Contains(string(text), p.tokens.Agent(sandbox.ID(id))) {
		p.Errorf("the Pod holds the agent's token, %v", err)
	}
	hook := pod.Spec.Containers[0].Lifecycle.PostStart.Exec.Command
	if len(hook) != 5 || hook[0] != "/.barchan/barchan-agent" || !strings.Contains(hook[2], envd.TokenSHA256(p.tokens.Agent(sandbox.ID(id)))) || hook[3] != "own" {
		p.Errorf("hook %q", hook)
	}
	if c := pod.Spec.Containers; len(c) != 2 || c[1].Lifecycle != nil || len(c[0].Command) != 0 || pod.Spec.InitContainers[0].Image != "agent:1" {
		p.Errorf("containers %+v, of which the init container is %+v", c, pod.Spec.InitContainers)
	}
}

func (p *podTest) checkOthers(s *agents.Sandbox, pod *corev1.Pod) {
	p.Helper()
	volumes := map[string]corev1.Volume{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = v
	}
	if v := volumes["data"]; v.PersistentVolumeClaim == nil || v.PersistentVolumeClaim.ClaimName != "data-whole" {
		p.Errorf("volumes %+v", pod.Spec.Volumes)
	}
	p.checkOwned(s, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "data-whole"}})
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "whole"}}
	p.checkOwned(s, service)
	if service.Spec.ClusterIP != corev1.ClusterIPNone || len(service.Spec.Selector) != 1 || service.Spec.Selector[sandbox.LabelID] != string(sandbox.IDOf(s.UID)) {
		p.Errorf("Service %+v", service.Spec)
	}
}

// checkRun has the Pod run, and the agent be given its token once.
func (p *podTest) checkRun(s *agents.Sandbox, pod *corev1.Pod) {
	p.Helper()
	id := string(sandbox.IDOf(s.UID))
	now := p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, "Pod exists with phase: Pending")
	if len(now.Finalizers) > 0 || len(p.requests(s)) > 0 {
		p.Errorf("finalizers %v, agent has got %v", now.Finalizers, p.requests(s))
	}
	p.run(pod, "127.0.0.9")
	now = p.ready(s, "Pod is Ready; Service Exists")
	if got := now.Status; got.Service != "whole" || got.ServiceFQDN != fmt.Sprintf("whole.%s.svc.cluster.local", p.namespace) || got.NodeName != podNode ||
		!slices.Equal(got.PodIPs, []string{"127.0.0.9"}) || got.Selector != agents.LabelSandboxNameHash+"="+sandbox.NameHash("whole") || got.Barchan.ID != id {
		p.Errorf("status %+v", got)
	}
	p.await(s, agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonNotSuspended, "Sandbox is not suspended")
	inits := p.requests(s)
	if len(inits) != 1 || inits[0].AccessToken != p.tokens.Agent(sandbox.ID(id)) || len(inits[0].EnvVars) != 1 || inits[0].EnvVars["A"] != "1" {
		p.Errorf("the agent has got %+v", inits)
	}
}

// TestPodOfAnOpenSandbox: its agent needs the token too, to prove its identity.
func TestPodOfAnOpenSandbox(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("open", func(s *agents.Sandbox) {
		s.Spec.Barchan = &agents.BarchanSpec{Access: &agents.AccessPolicy{OpenAgent: true}}
	})
	token := p.tokens.Agent(sandbox.IDOf(s.UID))
	pod := p.pod(s)
	hook := pod.Spec.Containers[0].Lifecycle.PostStart.Exec.Command
	if cfg, err := envd.ParseConfig(hook[2]); err != nil || !cfg.Open || cfg.AccessTokenSHA256 != envd.TokenSHA256(token) {
		t.Errorf("configuration %+v, %v", cfg, err)
	}
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	if inits := p.requests(s); len(inits) != 1 || !inits[0].Open || inits[0].AccessToken != token {
		t.Errorf("the agent received %+v", inits)
	}
}

func TestPodSuspendedAndResumed(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("box", withService)
	pod := p.pod(s)
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	since := func(s *agents.Sandbox) metav1.Time {
		return meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended).LastTransitionTime
	}
	began := since(p.ready(s, ""))
	for range 2 {
		p.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
		now := p.await(s, agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonPodTerminating, "Pod is terminating. Sandbox is suspending")
		if got := since(now); !got.Equal(&began) || len(now.Status.PodIPs) > 0 {
			t.Errorf("while it is being suspended: since %v, not %v, addresses %v", got, began, now.Status.PodIPs)
		}
		p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxSuspended, "Sandbox is suspending")
		p.setStatus(pod, func(st *corev1.PodStatus) { st.Phase = corev1.PodSucceeded }) // as its containers end
		p.end(pod)
		p.await(s, agents.ConditionSuspended, metav1.ConditionTrue, agents.ReasonPodTerminated, "Pod has been terminated. Sandbox is suspended")
		now = p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxSuspended, "Sandbox is suspended")
		if now.Status.Service != "box" || now.Status.Barchan.Phase != string(sandbox.Paused) {
			t.Errorf("suspended: %+v", now.Status)
		}
		if err := p.Get(t.Context(), client.ObjectKeyFromObject(s), &corev1.Service{}); err != nil {
			t.Errorf("the Service: %v", err)
		}
		before := pod.UID
		p.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
		pod = p.pod(s)
		if pod.UID == before {
			t.Error("the same Pod again")
		}
		p.run(pod, "127.0.0.10")
		began = since(p.ready(s, "Pod is Ready"))
	}
	// A Pod that is deleted by hand is made again, and that is no suspension.
	if err := p.Delete(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonPodTerminating, "Pod is terminating")
	before := pod.UID
	p.end(pod)
	eventually.True(t, "another Pod", func() bool { return p.Get(t.Context(), client.ObjectKeyFromObject(s), pod) == nil && pod.UID != before })
	p.run(pod, "127.0.0.11")
	if got := since(p.ready(s, "Pod is Ready")); !got.Equal(&began) {
		t.Errorf("Suspended changed at %v, not %v", got, began)
	}
}

// TestPodSuspendedFromTheStart: such a sandbox has its volumes and its Service, which it keeps when it runs.
func TestPodSuspendedFromTheStart(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("box", withService, withVolume, func(s *agents.Sandbox) {
		s.Spec.OperatingMode = agents.ModeSuspended
		s.Spec.Barchan = &agents.BarchanSpec{} // memory that there is not
	})
	now := p.await(s, agents.ConditionSuspended, metav1.ConditionTrue, agents.ReasonPodTerminated, "Sandbox is suspended")
	if now.Status.Service != "box" {
		t.Errorf("status %+v", now.Status)
	}
	volume := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "data-box"}}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "box"}}
	p.checkOwned(s, volume)
	p.checkOwned(s, service)
	if err := p.Get(t.Context(), client.ObjectKeyFromObject(s), &corev1.Pod{}); !apierrors.IsNotFound(err) {
		t.Errorf("its Pod: %v", err)
	}
	before := service.UID
	if err := p.Delete(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the Service again", func() bool {
		return p.Get(t.Context(), client.ObjectKeyFromObject(service), service) == nil && service.UID != before
	})
	p.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
	p.run(p.pod(s), "127.0.0.9")
	p.ready(s, "Pod is Ready; Service Exists")
	if kept := volume.UID; p.Get(t.Context(), client.ObjectKeyFromObject(volume), volume) != nil || volume.UID != kept {
		t.Errorf("another volume: %+v", volume)
	}
}

func TestPodOfSomebodyElse(t *testing.T) {
	p := startPods(t)
	for name, mode := range map[string]agents.OperatingMode{"running": agents.ModeRunning, "suspended": agents.ModeSuspended} {
		foreign := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: name}}
		foreign.Spec.Containers = []corev1.Container{{Name: "c", Image: "i"}}
		if err := p.Create(t.Context(), foreign); err != nil {
			t.Fatal(err)
		}
		s := p.sandbox(name, func(s *agents.Sandbox) { s.Spec.OperatingMode = mode })
		if mode == agents.ModeSuspended {
			p.await(s, agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonPodNotOwned, "Refused to delete pod because it is not owned by this sandbox")
			p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxSuspended, "Sandbox is suspending")
		} else {
			p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonReconcilerError, "Pod running exists and is not owned by this sandbox; delete or rename it")
		}
		now := &corev1.Pod{}
		if err := p.Get(t.Context(), client.ObjectKeyFromObject(foreign), now); err != nil || now.UID != foreign.UID || now.DeletionTimestamp != nil || len(now.OwnerReferences) > 0 {
			t.Errorf("%s: the foreign Pod is %+v, %v", name, now, err)
		}
	}
	// A second Pod that names the sandbox as its controller: which one is it? Neither is touched.
	s := p.sandbox("two")
	pod := p.pod(s)
	second := pod.DeepCopy()
	second.ObjectMeta = metav1.ObjectMeta{Namespace: p.namespace, Name: "two-more", Labels: pod.Labels, OwnerReferences: pod.OwnerReferences}
	second.Spec.NodeName = ""
	if err := p.Create(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonMultiplePods, "it owns 2 Pods")
}

// TestPodOverAQuota: the condition has the words of the ResourceQuota that refuses the Pod, and the sandbox runs once there is room.
func TestPodOverAQuota(t *testing.T) {
	p := startPods(t)
	none := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("0")}
	limit := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: none}}
	if err := p.Create(t.Context(), limit); err != nil {
		t.Fatal(err)
	}
	limit.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none} // the controller that writes it does not run here
	if err := p.Status().Update(t.Context(), limit); err != nil {
		t.Fatal(err)
	}
	s := p.sandbox("box")
	now := p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonReconcilerError, `pods "box" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0`)
	if c := meta.FindStatusCondition(now.Status.Conditions, agents.ConditionFinished); c != nil {
		t.Errorf("a quota, which may change, has ended it: %+v", c)
	}
	if err := p.Delete(t.Context(), limit); err != nil {
		t.Fatal(err)
	}
	p.run(p.pod(s), "127.0.0.9")
	p.ready(s, "Pod is Ready")
}

// TestPodOfAgentSandbox: a Pod that agent-sandbox made for a sandbox goes on when the cluster is taken over, without an agent.
func TestPodOfAgentSandbox(t *testing.T) {
	p := startPods(t)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "taken-over", Labels: map[string]string{agents.LabelSandboxNameHash: sandbox.NameHash("taken-over")}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "image:1"}}},
	}
	if err := p.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	s := p.sandbox(pod.Name)
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonReconcilerError, "is not owned by this sandbox")
	// The sandbox owns it from now on, as before the controller came.
	before := pod.DeepCopy()
	pod.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(s, agents.GroupVersion.WithKind("Sandbox"))}
	if err := p.Patch(t.Context(), pod, client.MergeFrom(before)); err != nil { // others write the Pod too
		t.Fatal(err)
	}
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, "Pod exists with phase: Pending")
	p.run(pod, "10.0.0.9")
	p.ready(s, "Pod is Ready")
	if requests := p.requests(s); len(requests) > 0 {
		t.Errorf("requests to an agent that is not there: %v", requests)
	}
	p.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	p.end(pod)
	p.await(s, agents.ConditionSuspended, metav1.ConditionTrue, agents.ReasonPodTerminated, "")
}

func TestPodRefusals(t *testing.T) {
	p := startPods(t)
	for name, tt := range map[string]struct {
		change func(*agents.Sandbox)
		want   string
	}{
		"hook": {func(s *agents.Sandbox) {
			s.Spec.PodTemplate.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 1}}}
		}, "spec.podTemplate.spec.containers[0].lifecycle.postStart: Forbidden"},
		"restore": {func(s *agents.Sandbox) {
			s.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}}
		}, "spec.barchan.restore: Forbidden: a Pod starts from its image only"},
		"warm-up": {func(s *agents.Sandbox) {
			s.Spec.Barchan = &agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{"x"}}}
		}, "spec.barchan.warmUp: Forbidden"},
		"egress": {func(s *agents.Sandbox) {
			s.Spec.Barchan = &agents.BarchanSpec{Network: &agents.EgressPolicy{Internet: new(false), AllowOut: []string{"8.8.8.8", "example.com"}}}
		}, "spec.barchan.network.allowOut[1]: Forbidden: a NetworkPolicy has no names"},
		"pod": {func(s *agents.Sandbox) {
			s.Spec.PodTemplate.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, Name: "UPPER"}}
		}, "spec.containers[0].ports[0].name"},
	} {
		t.Run(name, func(t *testing.T) {
			p := &podTest{T: t, Client: p.Client, namespace: p.namespace, tokens: p.tokens}
			s := p.sandbox("refused-"+name, tt.change)
			p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonReconcilerError, tt.want)
			p.await(s, agents.ConditionFinished, metav1.ConditionTrue, agents.ReasonPodFailed, tt.want)
			if err := p.Get(t.Context(), client.ObjectKeyFromObject(s), &corev1.Pod{}); !apierrors.IsNotFound(err) {
				t.Errorf("its Pod: %v", err)
			}
		})
	}
	s := p.sandbox("memory", func(s *agents.Sandbox) { s.Spec.Barchan = &agents.BarchanSpec{} })
	p.run(p.pod(s), "127.0.0.9")
	p.ready(s, "Pod is Ready")
	p.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	p.await(s, agents.ConditionSuspended, metav1.ConditionFalse, sandbox.ReasonSuspendFailed, "spec.barchan.suspend: Forbidden: a Pod has no memory")
	if pod := p.pod(s); pod.DeletionTimestamp != nil {
		t.Error("its Pod was deleted")
	}
}

func TestPodTroubles(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("troubled")
	pod := p.pod(s)
	p.setStatus(pod, func(st *corev1.PodStatus) {
		st.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available"}}
	})
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, "Unschedulable: 0/1 nodes are available")
	p.await(s, agents.ConditionPodScheduled, metav1.ConditionFalse, corev1.PodReasonUnschedulable, "0/1 nodes are available")
	waiting := func(st *corev1.PodStatus) {
		st.Phase = corev1.PodPending
		st.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}}
	}
	p.run(pod, "127.0.0.9", waiting)
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, sandbox.ReasonImage, "container main: ImagePullBackOff: no such image")
	p.await(s, agents.ConditionPodScheduled, metav1.ConditionTrue, "PodScheduled", "")
	p.mu.Lock()
	p.deaf = true
	p.mu.Unlock()
	p.run(pod, "127.0.0.9")
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonReconcilerError, "its agent does not answer")
	p.mu.Lock()
	p.deaf = false
	p.mu.Unlock()
	p.ready(s, "Pod is Ready")
	p.setStatus(pod, func(st *corev1.PodStatus) { st.Conditions[1].Status = corev1.ConditionFalse })
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonDependenciesNotReady, "Pod is Running but not Ready")
	p.setStatus(pod, func(st *corev1.PodStatus) {
		st.Phase, st.Reason, st.Message = corev1.PodFailed, "Evicted", "the node was low on memory"
	})
	p.await(s, agents.ConditionFinished, metav1.ConditionTrue, agents.ReasonPodFailed, "Evicted: the node was low on memory")
	ended := p.sandbox("ended")
	pod = p.pod(ended)
	p.run(pod, "127.0.0.9", func(st *corev1.PodStatus) {
		st.Phase = corev1.PodSucceeded
		st.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 0}}
	})
	p.await(ended, agents.ConditionFinished, metav1.ConditionTrue, agents.ReasonPodSucceeded, "Pod completed successfully")
}

func TestPodOfAnExpiredSandbox(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("retained", withService)
	pod := p.pod(s)
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	p.update(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime = new(metav1.NewTime(time.Now().Add(-time.Second))) })
	now := p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonSandboxExpired, "Sandbox has expired")
	p.await(s, agents.ConditionSuspended, metav1.ConditionFalse, agents.ReasonNotSuspended, "")
	p.end(pod)
	eventually.True(t, "the Service is gone", func() bool {
		return apierrors.IsNotFound(p.Get(t.Context(), client.ObjectKeyFromObject(s), &corev1.Service{}))
	})
	if now.Status.Service != "" || now.Status.ServiceFQDN != "" || len(now.Status.PodIPs) > 0 {
		t.Errorf("expired: %+v", now.Status)
	}
	// Removed with its object where it says so; nothing holds the object.
	gone := p.sandbox("deleted", func(s *agents.Sandbox) { s.Spec.ShutdownPolicy = agents.ShutdownDelete })
	p.pod(gone)
	p.update(gone, func(s *agents.Sandbox) { s.Spec.ShutdownTime = new(metav1.NewTime(time.Now().Add(-time.Second))) })
	eventually.True(t, "the object is gone", func() bool { return apierrors.IsNotFound(p.Get(t.Context(), client.ObjectKeyFromObject(gone), gone)) })
}

// TestPodService: a running sandbox has its Service again where a client has deleted it, and as its spec says later.
func TestPodService(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("box", withService)
	p.run(p.pod(s), "127.0.0.9")
	p.ready(s, "Pod is Ready; Service Exists")
	service := &corev1.Service{}
	read := func() error { return p.Get(t.Context(), client.ObjectKeyFromObject(s), service) }
	if err := read(); err != nil {
		t.Fatal(err)
	}
	before := service.UID
	if err := p.Delete(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the Service again", func() bool { return read() == nil && service.UID != before })
	p.update(s, func(s *agents.Sandbox) { s.Spec.Service = new(false) })
	eventually.True(t, "no Service", func() bool { return apierrors.IsNotFound(read()) })
	p.update(s, withService)
	eventually.NoError(t, "a Service", read)
	p.checkOwned(s, service)
}

// TestPodVolumeAgain: a volume that a client has deleted is made again for the next Pod.
func TestPodVolumeAgain(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("box", withVolume)
	pod := p.pod(s)
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	volume := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "data-box"}}
	read := func() error { return p.Get(t.Context(), client.ObjectKeyFromObject(volume), volume) }
	if err := errors.Join(read(), p.Delete(t.Context(), volume), p.Delete(t.Context(), pod)); err != nil {
		t.Fatal(err)
	}
	// The next Pod waits while the volume is being deleted, which ends with the Pod that used it.
	before := volume.UID
	p.end(pod)
	next := &corev1.Pod{}
	eventually.True(t, "another Pod", func() bool {
		return p.Get(t.Context(), client.ObjectKeyFromObject(s), next) == nil && next.UID != pod.UID
	})
	if err := p.Patch(t.Context(), volume, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	p.setStatus(next, func(st *corev1.PodStatus) {
		st.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: `persistentvolumeclaim "data-box" not found`}}
	})
	eventually.True(t, "the volume again", func() bool { return read() == nil && volume.UID != before })
	p.checkOwned(s, volume)
}

// TestPodReplacedWithinASecond: a container that starts again receives its token, although objects have its start in seconds.
func TestPodReplacedWithinASecond(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("box")
	pod := p.pod(s)
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	start := *pod.Status.ContainerStatuses[0].State.Running
	requested := func(n int) func() bool { return func() bool { return len(p.requests(s)) == n } }
	p.setStatus(pod, func(st *corev1.PodStatus) { st.ContainerStatuses[0].RestartCount++ })
	eventually.True(t, "a request to the agent of a container that started again", requested(2))
	if err := p.Delete(t.Context(), pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	before := pod.UID
	eventually.True(t, "another Pod", func() bool { return p.Get(t.Context(), client.ObjectKeyFromObject(s), pod) == nil && pod.UID != before })
	p.run(pod, "127.0.0.9", func(st *corev1.PodStatus) { st.ContainerStatuses[0].State.Running = &start })
	eventually.True(t, "a request to the agent of another Pod", requested(3))
	p.ready(s, "Pod is Ready")
}

// TestPodOfALostNode: the garbage collector of Pods lets a Pod fail before it deletes it, which is no end of the sandbox.
func TestPodOfALostNode(t *testing.T) {
	p := startPods(t)
	s := p.sandbox("box")
	pod := p.pod(s)
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	p.setStatus(pod, func(st *corev1.PodStatus) {
		st.Phase = corev1.PodFailed
		st.Conditions = append(st.Conditions, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByPodGC", Message: "PodGC: node no longer exists"})
	})
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonPodTerminating, "Pod is terminating")
	if err := p.Delete(t.Context(), pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	before := pod.UID
	eventually.True(t, "another Pod", func() bool { return p.Get(t.Context(), client.ObjectKeyFromObject(s), pod) == nil && pod.UID != before })
	p.run(pod, "127.0.0.10")
	p.ready(s, "Pod is Ready")
}
