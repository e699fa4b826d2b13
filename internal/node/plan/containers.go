package plan

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Container is a container besides the first: one that runs to its end before the sandbox starts, or a sidecar. It has an
// image and a root of its own, and the sandbox's network and volumes.
type Container struct {
	Name       string            `json:"name"`
	Image      string            `json:"image"`
	PullPolicy corev1.PullPolicy `json:"pullPolicy,omitempty"`

	Command  []string               `json:"command,omitempty"`
	Args     []string               `json:"args,omitempty"`
	Env      []corev1.EnvVar        `json:"env,omitempty"`
	EnvFrom  []corev1.EnvFromSource `json:"envFrom,omitempty"`
	Workdir  string                 `json:"workdir,omitempty"`
	User     string                 `json:"user,omitempty"`
	NonRoot  bool                   `json:"nonRoot,omitempty"`
	Limits   oci.Limits             `json:"limits"`
	Security oci.Security           `json:"security"`
	Requests corev1.ResourceList    `json:"requests,omitempty"`
	Volumes  []Volume               `json:"volumes,omitempty"`
	// OutputOnError puts the end of the output of a failed one into the reason.
	OutputOnError bool `json:"outputOnError,omitempty"`
	// The probes are those of a sidecar.
	Startup   *corev1.Probe `json:"startup,omitempty"`
	Readiness *corev1.Probe `json:"readiness,omitempty"`
	Liveness  *corev1.Probe `json:"liveness,omitempty"`
}

// setContainers sets the init containers and the sidecars. The sandbox has the limits of all that run at the same time.
func (p *Plan) setContainers(s *agents.Sandbox, byDefault oci.Limits, at *field.Path) (err error) {
	spec := &s.Spec.PodTemplate.Spec
	for i := 1; i < len(spec.Containers); i++ {
		c := &spec.Containers[i]
		p.Limits.MilliCPU += c.Resources.Limits.Cpu().MilliValue()
		p.Limits.Memory += c.Resources.Limits.Memory().Value()
		if p.Limits.CPUShares > 0 {
			p.Limits.CPUShares += c.Resources.Requests.Cpu().MilliValue()
		}
	}
	for i := range spec.InitContainers {
		of, err := p.container(s, &spec.InitContainers[i], byDefault, at.Child("initContainers").Index(i))
		if err != nil {
			return err
		}
		p.Init = append(p.Init, of)
	}
	for i := 1; i < len(spec.Containers); i++ {
		of, err := p.container(s, &spec.Containers[i], byDefault, at.Child("containers").Index(i))
		if err != nil {
			return err
		}
		p.Sidecars = append(p.Sidecars, of)
	}
	if len(p.Sidecars) > 0 {
		p.Name = spec.Containers[0].Name
	}
	return nil
}

func (p *Plan) container(s *agents.Sandbox, c *corev1.Container, byDefault oci.Limits, at *field.Path) (Container, error) {
	mounts, err := volumes(s, c, at)
	if err != nil {
		return Container{}, err
	}
	spec := &s.Spec.PodTemplate.Spec
	l := p.Limits // a container without limits may use what the sandbox may
	if len(c.Resources.Limits)+len(c.Resources.Requests) > 0 {
		l = limits(byDefault, c)
		l.Memory, l.MilliCPU = min(l.Memory, p.Limits.Memory), min(l.MilliCPU, p.Limits.MilliCPU)
	}
	of := Container{
		Name: c.Name, Image: c.Image, PullPolicy: c.ImagePullPolicy, Command: c.Command, Args: c.Args, Env: c.Env, EnvFrom: c.EnvFrom,
		Workdir: c.WorkingDir, NonRoot: nonRoot(spec, c), Limits: l, Requests: c.Resources.Requests, Volumes: mounts,
		OutputOnError: c.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError,
		Startup:       withPort(c.StartupProbe, c), Readiness: withPort(c.ReadinessProbe, c), Liveness: withPort(c.LivenessProbe, c),
	}
	of.User, of.Security = security(spec, c, p.Class)
	return of, nil
}

// Of is the plan of another container: that of a sandbox of the same name, network and volumes.
func (p *Plan) Of(c *Container) Plan {
	of := *p
	of.Image, of.PullPolicy, of.Command, of.Args, of.Env, of.EnvFrom = c.Image, c.PullPolicy, c.Command, c.Args, c.Env, c.EnvFrom
	of.Workdir, of.User, of.DefaultUser, of.NonRoot, of.Limits, of.Security, of.Volumes = c.Workdir, c.User, "", c.NonRoot, c.Limits, c.Security, c.Volumes
	of.Name, of.Init, of.Sidecars, of.Restore, of.WarmUp = c.Name, nil, nil, nil, nil
	of.Startup, of.Readiness, of.Liveness = c.Startup, c.Readiness, c.Liveness
	if p.Own != nil {
		own := *p.Own
		own.Requests = c.Requests
		of.Own = &own
	}
	return of
}

// Names are the names of the containers that run at the same time, in their order. That of the first is empty.
func (p *Plan) Names() []string {
	names := []string{""}
	for i := range p.Sidecars {
		names = append(names, p.Sidecars[i].Name)
	}
	return names
}

// Containers are the plans of these containers, as Of returns them. The first is the plan itself.
func (p *Plan) Containers() []Plan {
	all := []Plan{*p}
	for i := range p.Sidecars {
		all = append(all, p.Of(&p.Sidecars[i]))
	}
	return all
}

// ImageOf is the name of the image of one of them; empty if there is none.
func (p *Plan) ImageOf(name string) string {
	if name == "" {
		return p.Image
	}
	for i := range p.Sidecars {
		if p.Sidecars[i].Name == name {
			return p.Sidecars[i].Image
		}
	}
	return ""
}

// Lasting is the plan without the volumes that a checkpoint without memory leaves out.
func (p *Plan) Lasting() Plan {
	of := *p
	of.Volumes, of.Sidecars = lasting(p.Volumes), slices.Clone(p.Sidecars)
	for i := range of.Sidecars {
		of.Sidecars[i].Volumes = lasting(of.Sidecars[i].Volumes)
	}
	return of
}

// each visits the other containers.
func (p *Plan) each(visit func(*Container)) {
	for _, list := range [][]Container{p.Init, p.Sidecars} {
		for i := range list {
			visit(&list[i])
		}
	}
}

// SharedMemory are the volumes in memory that the sandbox's containers share.
func (p *Plan) SharedMemory() (shared []oci.Mount) {
	add := func(all []Volume) {
		for _, v := range all {
			if m := (oci.Mount{Shared: v.Memory, SizeLimit: v.SizeLimit}); v.Memory != "" && !slices.Contains(shared, m) {
				shared = append(shared, m)
			}
		}
	}
	add(p.Volumes)
	for i := range p.Sidecars {
		add(p.Sidecars[i].Volumes)
	}
	return shared
}

// SidecarRestart is what the agent of a sidecar does when its program ends. Without a policy it is that of Kubernetes.
func (p *Plan) SidecarRestart() string {
	if p.Restart == corev1.RestartPolicyNever {
		return ""
	}
	if p.Restart == corev1.RestartPolicyOnFailure {
		return envd.RestartOnFailure
	}
	return envd.RestartAlways
}
