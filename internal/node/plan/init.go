package plan

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// InitContainer is a container that runs to its end before the sandbox starts, with the sandbox's network and
// volumes.
type InitContainer struct {
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
}

func (p *Plan) setInit(s *agents.Sandbox, byDefault oci.Limits, at *field.Path) error {
	spec := &s.Spec.PodTemplate.Spec
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		mounts, err := volumes(s, c, at.Child("initContainers").Index(i))
		if err != nil {
			return err
		}
		l := p.Limits // a container without limits may use what the sandbox may
		if len(c.Resources.Limits)+len(c.Resources.Requests) > 0 {
			l = limits(byDefault, c)
			l.Memory, l.MilliCPU = min(l.Memory, p.Limits.Memory), min(l.MilliCPU, p.Limits.MilliCPU)
		}
		init := InitContainer{
			Name: c.Name, Image: c.Image, PullPolicy: c.ImagePullPolicy, Command: c.Command, Args: c.Args, Env: c.Env, EnvFrom: c.EnvFrom,
			Workdir: c.WorkingDir, NonRoot: nonRoot(spec, c), Limits: l, Requests: c.Resources.Requests, Volumes: mounts,
			OutputOnError: c.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError,
		}
		init.User, init.Security = security(spec, c, p.Class)
		p.Init = append(p.Init, init)
	}
	return nil
}

// OfInit is the plan of an init container: that of a sandbox of the same name, network and volumes.
func (p *Plan) OfInit(i int) Plan {
	c, of := &p.Init[i], *p
	of.Image, of.PullPolicy, of.Command, of.Args, of.Env, of.EnvFrom = c.Image, c.PullPolicy, c.Command, c.Args, c.Env, c.EnvFrom
	of.Workdir, of.User, of.DefaultUser, of.NonRoot, of.Limits, of.Security, of.Volumes = c.Workdir, c.User, "", c.NonRoot, c.Limits, c.Security, c.Volumes
	of.Init, of.Restore, of.WarmUp, of.Startup, of.Readiness, of.Liveness = nil, nil, nil, nil, nil, nil
	if p.Own != nil {
		own := *p.Own
		own.Requests = c.Requests
		of.Own = &own
	}
	return of
}
