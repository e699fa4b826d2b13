package node

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// plan is what a sandbox's object asks of the node, in the node's words. It is kept in the
// journal, so that a sandbox can be restarted without its object.
type plan struct {
	Ref      sandbox.Ref `json:"ref"`
	ID       sandbox.ID  `json:"id"`
	Class    oci.Class   `json:"class"`
	Revision string      `json:"revision,omitempty"`
	Template string      `json:"template,omitempty"`

	Image      string            `json:"image"`
	PullPolicy corev1.PullPolicy `json:"pullPolicy,omitempty"`

	Command []string        `json:"command,omitempty"`
	Args    []string        `json:"args,omitempty"`
	Env     []corev1.EnvVar `json:"env,omitempty"`
	Workdir string          `json:"workdir,omitempty"`
	User    string          `json:"user,omitempty"`
	NonRoot bool            `json:"nonRoot,omitempty"`

	Hostname    string               `json:"hostname"`
	HostAliases []corev1.HostAlias   `json:"hostAliases,omitempty"`
	DNSPolicy   corev1.DNSPolicy     `json:"dnsPolicy,omitempty"`
	DNSConfig   *corev1.PodDNSConfig `json:"dnsConfig,omitempty"`

	Limits   oci.Limits   `json:"limits"`
	Security oci.Security `json:"security"`
	Volumes  []volume     `json:"volumes,omitempty"`
	Secure   bool         `json:"secure,omitempty"`

	// Restore is the checkpoint that the sandbox was made from, if any. Once it has lived it needs
	// the checkpoint no more.
	Restore *restoring     `json:"restore,omitempty"`
	WarmUp  *agents.WarmUp `json:"warmUp,omitempty"`

	Network       *agents.EgressPolicy  `json:"network,omitempty"`
	NetworkPolicy *agents.NetworkPolicy `json:"networkPolicy,omitempty"`

	Restart   corev1.RestartPolicy `json:"restart,omitempty"`
	Startup   *corev1.Probe        `json:"startup,omitempty"`
	Readiness *corev1.Probe        `json:"readiness,omitempty"`
	Liveness  *corev1.Probe        `json:"liveness,omitempty"`
}

// probed reports whether a sandbox is ready only once its probes say so.
func (p *plan) probed() bool { return p.Readiness != nil || p.Startup != nil }

// volume is one mount of a template.
type volume struct {
	// Claim or Scratch names a directory of the sandbox's own; neither means memory.
	Claim     string `json:"claim,omitempty"`
	Scratch   string `json:"scratch,omitempty"`
	SubPath   string `json:"subPath,omitempty"`
	Target    string `json:"target"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	SizeLimit int64  `json:"sizeLimit,omitempty"`
}

// newPlan reads an object. The error is an errs.ErrInvalid that names the field.
func (n *Node) newPlan(s *agents.Sandbox) (plan, error) {
	spec := &s.Spec.PodTemplate.Spec
	at := field.NewPath("spec", "podTemplate", "spec")
	if problems := sandbox.CheckRunnable(spec, at); len(problems) > 0 {
		return plan{}, fmt.Errorf("%w: %w", problems.ToAggregate(), errs.ErrInvalid)
	}
	c := &spec.Containers[0]
	p := plan{
		Ref: sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}, ID: sandbox.IDOf(s.UID),
		Class: n.cfg.DefaultClass, Revision: s.Labels[agents.LabelTemplateHash], Template: s.Annotations[agents.AnnotationTemplateRef],
		Image: c.Image, PullPolicy: c.ImagePullPolicy, Command: c.Command, Args: c.Args, Env: c.Env, Workdir: c.WorkingDir,
		Hostname: hostname(spec, s.Name), HostAliases: spec.HostAliases, DNSPolicy: spec.DNSPolicy, DNSConfig: spec.DNSConfig,
		Limits: n.limits(c), Restart: spec.RestartPolicy,
		Startup: withPort(c.StartupProbe, c), Readiness: withPort(c.ReadinessProbe, c), Liveness: withPort(c.LivenessProbe, c),
		Secure: s.Spec.AgentSecured(),
	}
	p.setNetwork(s)
	if b := s.Spec.Barchan; b != nil {
		p.WarmUp = b.WarmUp.DeepCopy()
	}
	if spec.RuntimeClassName != nil && *spec.RuntimeClassName != "" {
		p.Class = oci.Class(*spec.RuntimeClassName)
	}
	if n.runtimes[p.Class] == nil {
		return plan{}, fmt.Errorf("%s: this node does not offer class %q: %w", at.Child("runtimeClassName"), p.Class, errs.ErrInvalid)
	}
	p.User, p.Security = security(spec, c, p.Class)
	p.NonRoot = nonRoot(spec, c)
	var err error
	if _, err = p.egress(); err != nil {
		return plan{}, err
	}
	p.Volumes, err = volumes(s, c, at)
	return p, err
}

// withPort is a probe with its port as a number.
func withPort(p *corev1.Probe, c *corev1.Container) *corev1.Probe {
	if p == nil {
		return nil
	}
	p = p.DeepCopy()
	for _, named := range c.Ports {
		number := intstr.FromInt32(named.ContainerPort)
		if p.HTTPGet != nil && p.HTTPGet.Port.StrVal == named.Name && named.Name != "" {
			p.HTTPGet.Port = number
		}
		if p.TCPSocket != nil && p.TCPSocket.Port.StrVal == named.Name && named.Name != "" {
			p.TCPSocket.Port = number
		}
	}
	return p
}

// memoryPerProcess bounds the processes of a sandbox of class gVisor by its memory: a shell's child that
// does nothing takes 0.5 to 0.7 MiB of it, and a sandbox without memory ends.
const memoryPerProcess = 1 << 20

// processes is how many processes and threads a user may have in a sandbox of class gVisor.
func (p *plan) processes() int {
	return int(max(1, min(p.Limits.Pids, p.Limits.Memory/memoryPerProcess)))
}

func hostname(spec *corev1.PodSpec, name string) string {
	if spec.Hostname != "" {
		return spec.Hostname
	}
	return strings.TrimRight(name[:min(len(name), 63)], "-.")
}

// limits are the container's; what has none of its own is bound by the node's defaults.
func (n *Node) limits(c *corev1.Container) oci.Limits {
	l := n.cfg.DefaultLimits
	if q, ok := c.Resources.Requests[corev1.ResourceCPU]; ok {
		l.CPUShares = q.MilliValue()
	}
	if q, ok := c.Resources.Limits[corev1.ResourceCPU]; ok {
		l.MilliCPU = q.MilliValue()
	} else {
		l.MilliCPU = max(l.MilliCPU, l.CPUShares)
	}
	if q, ok := c.Resources.Limits[corev1.ResourceMemory]; ok {
		l.Memory = q.Value()
	} else if q, ok := c.Resources.Requests[corev1.ResourceMemory]; ok {
		l.Memory = max(l.Memory, q.Value())
	}
	return l
}

// security is the user of the entrypoint and what its processes may become.
//
// Under gVisor setuid programs work unless allowPrivilegeEscalation is false: what they gain
// is a privilege of the sandbox's own kernel, whose process on the machine can gain none, and
// sudo is part of what the sandboxes' users expect. Under runc it would be a privilege
// of the machine's kernel: there they work only where the template asks for it.
func security(spec *corev1.PodSpec, c *corev1.Container, class oci.Class) (user string, s oci.Security) {
	s.NoNewPrivileges = class == oci.Runc
	var uid, gid *int64
	if p := spec.SecurityContext; p != nil {
		uid, gid = p.RunAsUser, p.RunAsGroup
	}
	if p := c.SecurityContext; p != nil {
		if p.RunAsUser != nil {
			uid = p.RunAsUser
		}
		if p.RunAsGroup != nil {
			gid = p.RunAsGroup
		}
		if p.AllowPrivilegeEscalation != nil {
			s.NoNewPrivileges = !*p.AllowPrivilegeEscalation
		}
		s.ReadOnlyRoot = p.ReadOnlyRootFilesystem != nil && *p.ReadOnlyRootFilesystem
		s.Capabilities = capabilities(p.Capabilities)
	}
	switch {
	case uid != nil && gid != nil:
		user = fmt.Sprintf("%d:%d", *uid, *gid)
	case uid != nil:
		user = fmt.Sprint(*uid)
	case gid != nil:
		user = fmt.Sprintf("0:%d", *gid)
	}
	return user, s
}

func nonRoot(spec *corev1.PodSpec, c *corev1.Container) bool {
	if p := c.SecurityContext; p != nil && p.RunAsNonRoot != nil {
		return *p.RunAsNonRoot
	}
	return spec.SecurityContext != nil && spec.SecurityContext.RunAsNonRoot != nil && *spec.SecurityContext.RunAsNonRoot
}

// capabilities changes the default set; nil means that set.
func capabilities(c *corev1.Capabilities) []string {
	if c == nil || len(c.Add)+len(c.Drop) == 0 {
		return nil
	}
	set := oci.DefaultCapabilities()
	for _, drop := range c.Drop {
		if strings.EqualFold(string(drop), "ALL") {
			// The agent needs these to become the sandbox's users and to mind their processes.
			set = []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"}
			continue
		}
		set = slices.DeleteFunc(set, func(have string) bool { return have == capability(drop) })
	}
	for _, add := range c.Add {
		if name := capability(add); !slices.Contains(set, name) {
			set = append(set, name)
		}
	}
	return set
}

func capability(c corev1.Capability) string {
	return "CAP_" + strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_")
}

// volumes resolves what the container mounts.
func volumes(s *agents.Sandbox, c *corev1.Container, at *field.Path) (result []volume, err error) {
	for i, m := range c.VolumeMounts {
		v := volume{SubPath: m.SubPath, Target: path.Clean(m.MountPath), ReadOnly: m.ReadOnly}
		isClaim := func(t agents.PersistentVolumeClaimTemplate) bool { return t.Name == m.Name }
		isVolume := func(t corev1.Volume) bool { return t.Name == m.Name }
		if j := slices.IndexFunc(s.Spec.PodTemplate.Spec.Volumes, isVolume); j >= 0 {
			source := s.Spec.PodTemplate.Spec.Volumes[j].EmptyDir
			if source.Medium != corev1.StorageMediumMemory {
				v.Scratch = m.Name
			} else if source.SizeLimit != nil {
				v.SizeLimit = source.SizeLimit.Value()
			}
		} else if slices.ContainsFunc(s.Spec.VolumeClaimTemplates, isClaim) {
			v.Claim = m.Name
		} else {
			where := at.Child("containers").Index(0).Child("volumeMounts").Index(i).Child("name")
			return nil, fmt.Errorf("%w: %w", field.NotFound(where, m.Name), errs.ErrInvalid)
		}
		result = append(result, v)
	}
	return result, nil
}
