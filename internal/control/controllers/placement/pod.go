package placement

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	agentVolume    = "barchan-agent"
	agentContainer = "barchan-agent"
	agentDir       = "/.barchan"
	agentProgram   = agentDir + "/barchan-agent"
)

// Pod returns the Pod of a sandbox. An errs.ErrInvalid names the field of what a Pod with the agent cannot have.
func (p *Placer) Pod(s *agents.Sandbox) (*corev1.Pod, error) {
	template := s.Spec.PodTemplate
	pod := &corev1.Pod{ObjectMeta: p.ownedBy(s, sandbox.PodName(s)), Spec: *template.Spec.DeepCopy()}
	pod.Labels = maps.Clone(template.ObjectMeta.Labels)
	pod.Annotations = maps.Clone(template.ObjectMeta.Annotations)
	label(&pod.ObjectMeta, s)
	if pod.Spec.AutomountServiceAccountToken == nil { // untrusted code gets no credentials that it was not given
		pod.Spec.AutomountServiceAccountToken = new(false)
	}
	if pod.Spec.RuntimeClassName == nil && p.cfg.RuntimeClass != "" {
		pod.Spec.RuntimeClassName = &p.cfg.RuntimeClass
	}
	mountClaims(s, &pod.Spec)
	if err := p.addAgent(s, &pod.Spec); err != nil {
		return nil, err
	}
	return pod, nil
}

// label sets the labels by which Services and people find what a sandbox has.
func label(o *metav1.ObjectMeta, s *agents.Sandbox) {
	if o.Labels == nil {
		o.Labels = map[string]string{}
	}
	o.Labels[sandbox.LabelID] = string(sandbox.IDOf(s.UID))
	o.Labels[agents.LabelSandboxNameHash] = sandbox.NameHash(s.Name)
}

// ownedBy returns the metadata of an object that a sandbox controls.
func (p *Placer) ownedBy(s *agents.Sandbox, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: s.Namespace, Name: name,
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(s, agents.GroupVersion.WithKind("Sandbox"))},
	}
}

// mountClaims makes the claims of volumeClaimTemplates the volumes of the same names. As in a StatefulSet
// they replace a volume of the Pod's that has the name.
func mountClaims(s *agents.Sandbox, spec *corev1.PodSpec) {
	for _, t := range s.Spec.VolumeClaimTemplates {
		spec.Volumes = slices.DeleteFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == t.Name })
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: t.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName(s, t.Name)},
		}})
	}
}

// addAgent puts the agent beside the program of the first container.
func (p *Placer) addAgent(s *agents.Sandbox, spec *corev1.PodSpec) error {
	at := field.NewPath("spec", "podTemplate", "spec")
	if len(spec.Containers) == 0 {
		return fmt.Errorf("%w: %w", field.Required(at.Child("containers"), "name at least one container"), errs.ErrInvalid)
	}
	first := &spec.Containers[0]
	hook, err := p.agentCommand(s)
	if err != nil {
		return err
	}
	if first.Lifecycle == nil {
		first.Lifecycle = &corev1.Lifecycle{}
	}
	if own := first.Lifecycle.PostStart; own != nil {
		if own.Exec == nil {
			return fmt.Errorf("%w: %w", field.Forbidden(at.Child("containers").Index(0).Child("lifecycle", "postStart"), "can only be exec in the first container, whose hook also starts the agent"), errs.ErrInvalid)
		}
		hook = append(hook, own.Exec.Command...)
	}
	first.Lifecycle.PostStart = &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: hook}}
	first.VolumeMounts = append(first.VolumeMounts, corev1.VolumeMount{Name: agentVolume, MountPath: agentDir, ReadOnly: true})
	p.addAgentVolume(spec)
	return nil
}

func (p *Placer) addAgentVolume(spec *corev1.PodSpec) {
	if p.cfg.ImageVolumes {
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: agentVolume, VolumeSource: corev1.VolumeSource{
			Image: &corev1.ImageVolumeSource{Reference: p.cfg.AgentImage, PullPolicy: corev1.PullIfNotPresent},
		}})
		return
	}
	spec.Volumes = append(spec.Volumes, corev1.Volume{Name: agentVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	spec.InitContainers = slices.Insert(spec.InitContainers, 0, corev1.Container{
		Name: agentContainer, Image: p.cfg.AgentImage, ImagePullPolicy: corev1.PullIfNotPresent,
		Command:         []string{"/barchan-agent", "-install", agentDir},
		VolumeMounts:    []corev1.VolumeMount{{Name: agentVolume, MountPath: agentDir}},
		Resources:       copierResources(spec.Containers[0].Resources),
		SecurityContext: copierSecurity(spec.Containers[0].SecurityContext),
	})
}

// copierResources returns the CPU, memory and local storage of the first container for the one that copies the agent, which has ended
// before that one starts: so the Pod asks for no more, keeps its QoS class, and fits a ResourceQuota or LimitRange that wants a limit of
// every container.
func copierResources(first corev1.ResourceRequirements) corev1.ResourceRequirements {
	of := func(list corev1.ResourceList) (own corev1.ResourceList) {
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			if quantity, ok := list[name]; ok {
				if own == nil {
					own = corev1.ResourceList{}
				}
				own[name] = quantity
			}
		}
		return own
	}
	return corev1.ResourceRequirements{Requests: of(first.Requests), Limits: of(first.Limits)}
}

// copierSecurity has the container that copies the agent run as the first container does, without its privileges: a namespace that
// admits the one then admits the other.
func copierSecurity(first *corev1.SecurityContext) *corev1.SecurityContext {
	own := &corev1.SecurityContext{
		AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true),
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
	if first != nil {
		own.RunAsUser, own.RunAsGroup, own.RunAsNonRoot = first.RunAsUser, first.RunAsGroup, first.RunAsNonRoot
		own.SeccompProfile, own.SELinuxOptions, own.AppArmorProfile = first.SeccompProfile, first.SELinuxOptions, first.AppArmorProfile
	}
	return own
}

// agentCommand returns the hook's command. It holds no secret, for it can be read in the Pod.
func (p *Placer) agentCommand(s *agents.Sandbox) ([]string, error) {
	id := sandbox.IDOf(s.UID)
	cfg := envd.Config{
		SandboxID: string(id), TemplateID: s.Annotations[agents.AnnotationTemplateRef],
		AccessTokenSHA256: envd.TokenSHA256(p.cfg.Tokens.Agent(id)), Open: !s.Spec.AgentSecured(),
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, fmt.Errorf("configuration of the agent: %w", err)
	}
	return []string{agentProgram, "-detach", string(text)}, nil
}
