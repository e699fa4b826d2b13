package v1beta1

import corev1 "k8s.io/api/core/v1"

// DefaultWarmUpSeconds is the default timeout of a warm-up.
const DefaultWarmUpSeconds = 300

// SetDefaults fills what the user left out. It may be called any number of times.
func SetDefaults(s *Sandbox) {
	if s.Spec.ShutdownPolicy == "" {
		s.Spec.ShutdownPolicy = ShutdownRetain
	}
	if s.Spec.OperatingMode == "" {
		s.Spec.OperatingMode = ModeRunning
	}
	SetBlueprintDefaults(&s.Spec.SandboxBlueprint)
	if b := s.Spec.Barchan; b != nil {
		SetBarchanDefaults(b)
	}
}

// SetBlueprintDefaults fills what Kubernetes fills in a pod spec that lies in another object:
// the defaults that its schema names, not those of a Pod.
func SetBlueprintDefaults(b *SandboxBlueprint) {
	pod := &b.PodTemplate.Spec
	for i := range pod.InitContainers {
		setContainerDefaults(&pod.InitContainers[i])
	}
	for i := range pod.Containers {
		setContainerDefaults(&pod.Containers[i])
	}
}

func setContainerDefaults(c *corev1.Container) {
	for i := range c.Ports {
		if c.Ports[i].Protocol == "" {
			c.Ports[i].Protocol = corev1.ProtocolTCP
		}
	}
	for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		if p != nil && p.GRPC != nil && p.GRPC.Service == nil {
			p.GRPC.Service = new(string)
		}
	}
	for i := range c.Env {
		if from := c.Env[i].ValueFrom; from != nil && from.FileKeyRef != nil && from.FileKeyRef.Optional == nil {
			from.FileKeyRef.Optional = new(bool)
		}
	}
}

// AgentSecured reports whether the sandbox's agent requires its access token.
func (s *SandboxSpec) AgentSecured() bool {
	return s.Barchan == nil || s.Barchan.Access == nil || !s.Barchan.Access.OpenAgent
}

// SetBarchanDefaults fills what the user left out of Barchan's own part.
func SetBarchanDefaults(b *BarchanSpec) {
	if b.OnTimeout == "" {
		b.OnTimeout = TimeoutShutdown
	}
	if b.Suspend == "" {
		b.Suspend = SuspendMemory
	}
	if b.Resume == "" {
		b.Resume = ResumeMemory
	}
	if b.WarmUp != nil && b.WarmUp.TimeoutSeconds == 0 {
		b.WarmUp.TimeoutSeconds = DefaultWarmUpSeconds
	}
	if b.Fork != nil && b.Fork.Secrets == "" {
		b.Fork.Secrets = SecretsRefuse
	}
	if b.Idle != nil && b.Idle.Action == "" {
		b.Idle.Action = TimeoutPause
	}
	yes := true
	if b.Access != nil && b.Access.PublicTraffic == nil {
		b.Access.PublicTraffic = &yes
	}
	if b.Network != nil && b.Network.Internet == nil {
		b.Network.Internet = &yes
	}
}
