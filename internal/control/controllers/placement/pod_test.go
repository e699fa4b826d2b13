package placement

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// whole has fields of which a cluster's schedulers, kubelets and volumes take notice.
const whole = `
automountServiceAccountToken: true
runtimeClassName: kata
nodeSelector: {pool: agents}
tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]
priorityClassName: low
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: In, values: [a]}]}]}}}
topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
securityContext: {runAsUser: 1000, fsGroup: 1000}
imagePullSecrets: [{name: pull}]
initContainers:
- {name: fetch, image: "image:0", command: [fetch], envFrom: [{secretRef: {name: keys}}], volumeMounts: [{name: settings, mountPath: /settings}]}
- {name: beside, image: "image:1", restartPolicy: Always}
containers:
- name: main
  image: image:2
  command: [program]
  args: [argument]
  envFrom: [{secretRef: {name: keys}}, {configMapRef: {name: settings, optional: true}, prefix: P_}]
  env: [{name: KEY, valueFrom: {secretKeyRef: {name: keys, key: one}}}]
  resources: {limits: {memory: 1Gi}}
  readinessProbe: {httpGet: {path: /, port: 80}}
  volumeMounts: [{name: keys, mountPath: /keys, readOnly: true}, {name: settings, mountPath: /settings}]
- {name: second, image: "image:3", env: [{name: B, value: "2"}]}
volumes:
- {name: keys, secret: {secretName: keys, defaultMode: 256}}
- {name: settings, configMap: {name: settings, items: [{key: a, path: b}]}}
- {name: all, projected: {sources: [{secret: {name: keys}}, {configMap: {name: settings}}]}}
`

// TestPodKeepsTheTemplate: a Pod is the template's but for what brings the agent.
func TestPodKeepsTheTemplate(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "box", UID: "u"}}
	if err := yaml.UnmarshalStrict([]byte(whole), &s.Spec.PodTemplate.Spec); err != nil {
		t.Fatal(err)
	}
	given := s.DeepCopy()
	for _, images := range []bool{false, true} {
		c := fake.NewClientBuilder().Build()
		p, err := New(Config{Client: c, Cache: c, Tokens: tokens, AgentImage: "agent:1", ImageVolumes: images, RuntimeClass: "gvisor", Namespace: "roles"})
		if err != nil {
			t.Fatal(err)
		}
		pod, err := p.Pod(s)
		if err != nil {
			t.Fatal(err)
		}
		got := &pod.Spec
		if first := got.InitContainers[0]; (first.Image == "agent:1") == images {
			t.Errorf("image volumes %v, and the first init container is %+v", images, first)
		}
		first := &got.Containers[0]
		if first.Lifecycle == nil || first.Lifecycle.PostStart.Exec.Command[0] != agentProgram {
			t.Errorf("the agent does not start: %+v", first.Lifecycle)
		}
		// Without the agent it is the template.
		first.Lifecycle = nil
		first.VolumeMounts = slices.DeleteFunc(first.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == agentVolume })
		got.Volumes = slices.DeleteFunc(got.Volumes, func(v corev1.Volume) bool { return v.Name == agentVolume })
		got.InitContainers = slices.DeleteFunc(got.InitContainers, func(c corev1.Container) bool { return c.Name == agentContainer })
		if want := &given.Spec.PodTemplate.Spec; !equality.Semantic.DeepEqual(got, want) {
			t.Errorf("image volumes %v: the Pod is\n%+v\nwant the template's\n%+v", images, got, want)
		}
	}
	if !equality.Semantic.DeepEqual(s, given) {
		t.Error("it changed the sandbox")
	}
}

// TestCopierFits: the container that copies the agent fits where the first container does: a ResourceQuota wants limits of both, Pod
// security a user and a seccomp profile, and the QoS class wants equal requests and limits. It gets no device and no privilege.
func TestCopierFits(t *testing.T) {
	p := &Placer{cfg: Config{AgentImage: "agent:1"}}
	spec := &corev1.PodSpec{}
	if err := yaml.UnmarshalStrict([]byte(`
containers:
- name: main
  resources: {requests: {cpu: 100m, memory: 64Mi, example.com/gpu: 1}, limits: {cpu: "1", memory: 64Mi, ephemeral-storage: 1Gi, example.com/gpu: 1}}
  securityContext: {privileged: true, runAsUser: 1000, runAsGroup: 1001, runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}, capabilities: {add: [NET_ADMIN]}}
`), spec); err != nil {
		t.Fatal(err)
	}
	p.addAgentVolume(spec)
	want := corev1.Container{}
	if err := yaml.UnmarshalStrict([]byte(`
resources: {requests: {cpu: 100m, memory: 64Mi}, limits: {cpu: "1", memory: 64Mi, ephemeral-storage: 1Gi}}
securityContext:
  {runAsUser: 1000, runAsGroup: 1001, runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}, allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
`), &want); err != nil {
		t.Fatal(err)
	}
	got := spec.InitContainers[0]
	if !equality.Semantic.DeepEqual(got.Resources, want.Resources) || !equality.Semantic.DeepEqual(got.SecurityContext, want.SecurityContext) {
		t.Errorf("got %+v, %+v, want %+v, %+v", got.Resources, got.SecurityContext, want.Resources, want.SecurityContext)
	}
	plain := &corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}
	p.addAgentVolume(plain)
	if c := plain.InitContainers[0]; c.Resources.Requests != nil || c.Resources.Limits != nil || c.SecurityContext.RunAsUser != nil {
		t.Errorf("without any, it has %+v, %+v", c.Resources, c.SecurityContext)
	}
}
