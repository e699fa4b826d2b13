// Package plan compiles a Sandbox object into the node's plan for it: class, image, limits, volumes,
// probes, environment and the files about its network. A plan is stored in the journal, so that the node can
// start a container again without the object. JSON keys are therefore permanent.
//
// The package changes nothing on the host except the files of WriteSystemFiles. It holds no lock and no state.
package plan

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Plan is the node's plan for one Sandbox object.
type Plan struct {
	Ref      sandbox.Ref `json:"ref"`
	ID       sandbox.ID  `json:"id"`
	Class    oci.Class   `json:"class"`
	Revision string      `json:"revision,omitempty"`
	Template string      `json:"template,omitempty"`

	Image      string            `json:"image"`
	PullPolicy corev1.PullPolicy `json:"pullPolicy,omitempty"`
	// PullSecrets are names of Secrets with the credentials for the image.
	PullSecrets []string `json:"pullSecrets,omitempty"`

	Command []string `json:"command,omitempty"`
	Args    []string `json:"args,omitempty"`
	// Env and EnvFrom refer to values of Secrets and ConfigMaps, and have none of them.
	Env     []corev1.EnvVar        `json:"env,omitempty"`
	EnvFrom []corev1.EnvFromSource `json:"envFrom,omitempty"`
	// Own has what the sandbox's variables and files refer to of its object; nil if they refer to nothing.
	Own     *Own   `json:"own,omitempty"`
	Workdir string `json:"workdir,omitempty"`
	User    string `json:"user,omitempty"`
	// DefaultUser is that of requests to the agent; empty: User.
	DefaultUser string `json:"defaultUser,omitempty"`
	NonRoot     bool   `json:"nonRoot,omitempty"`

	Hostname    string               `json:"hostname"`
	HostAliases []corev1.HostAlias   `json:"hostAliases,omitempty"`
	DNSPolicy   corev1.DNSPolicy     `json:"dnsPolicy,omitempty"`
	DNSConfig   *corev1.PodDNSConfig `json:"dnsConfig,omitempty"`

	Limits oci.Limits `json:"limits"`
	// Disk bounds the bytes of root and scratch volumes; zero: the node's default. ClaimSizes are those of the volume claims.
	Disk       int64            `json:"disk,omitempty"`
	ClaimSizes map[string]int64 `json:"claimSizes,omitempty"`
	Security   oci.Security     `json:"security"`
	// Volumes are all mounts of the sandbox, in the template's order.
	Volumes []Volume `json:"volumes,omitempty"`
	// Init are the containers that run before the sandbox starts, each to its end.
	Init []Container `json:"init,omitempty"`
	// Sidecars are the containers beside the first, which run as long as it does. With any, Name is the first one's.
	Sidecars []Container `json:"sidecars,omitempty"`
	Name     string      `json:"name,omitempty"`
	// Projections are the contents of the volumes of Secrets, ConfigMaps and the object's fields.
	Projections []Projection `json:"projections,omitempty"`
	Secure      bool         `json:"secure,omitempty"`

	// Restore is the checkpoint that the sandbox is created from, if any. Once live, it no longer needs the
	// checkpoint.
	Restore *Restoring     `json:"restore,omitempty"`
	WarmUp  *agents.WarmUp `json:"warmUp,omitempty"`

	Network       *agents.EgressPolicy  `json:"network,omitempty"`
	NetworkPolicy *agents.NetworkPolicy `json:"networkPolicy,omitempty"`

	Restart   corev1.RestartPolicy `json:"restart,omitempty"`
	Startup   *corev1.Probe        `json:"startup,omitempty"`
	Readiness *corev1.Probe        `json:"readiness,omitempty"`
	Liveness  *corev1.Probe        `json:"liveness,omitempty"`
}

// Probed reports whether a sandbox's readiness depends on probes.
func (p *Plan) Probed() bool { return p.Readiness != nil || p.Startup != nil }

// Defaults are the node's values for empty fields of an object.
type Defaults struct {
	Class  oci.Class
	Limits oci.Limits
	// Offers reports whether the node has a runtime of a class.
	Offers func(oci.Class) bool
}

// New reads an object. The error is an errs.ErrInvalid that names the field.
func New(s *agents.Sandbox, d Defaults) (Plan, error) {
	spec := &s.Spec.PodTemplate.Spec
	at := field.NewPath("spec", "podTemplate", "spec")
	if problems := sandbox.CheckRunnable(spec, at); len(problems) > 0 {
		return Plan{}, fmt.Errorf("%w: %w", problems.ToAggregate(), errs.ErrInvalid)
	}
	c := &spec.Containers[0]
	p := Plan{
		Ref: sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}, ID: sandbox.IDOf(s.UID),
		Class: d.Class, Revision: s.Labels[agents.LabelTemplateHash], Template: s.Annotations[agents.AnnotationTemplateRef],
		Image: c.Image, PullPolicy: c.ImagePullPolicy, Command: c.Command, Args: c.Args, Env: c.Env, Workdir: c.WorkingDir,
		Hostname: hostname(spec, s.Name), HostAliases: spec.HostAliases, DNSPolicy: spec.DNSPolicy, DNSConfig: spec.DNSConfig,
		EnvFrom: c.EnvFrom, Limits: limits(d.Limits, c), Restart: spec.RestartPolicy,
		Startup: withPort(c.StartupProbe, c), Readiness: withPort(c.ReadinessProbe, c), Liveness: withPort(c.LivenessProbe, c),
		Secure: s.Spec.AgentSecured(),
	}
	for _, ref := range spec.ImagePullSecrets {
		p.PullSecrets = append(p.PullSecrets, ref.Name)
	}
	p.SetNetwork(s)
	p.setDisk(s)
	if b := s.Spec.Barchan; b != nil {
		p.WarmUp, p.DefaultUser = b.WarmUp.DeepCopy(), b.DefaultUser
	}
	if spec.RuntimeClassName != nil && *spec.RuntimeClassName != "" {
		p.Class = oci.Class(*spec.RuntimeClassName)
	}
	if !d.Offers(p.Class) {
		return Plan{}, fmt.Errorf("%s: this node does not offer class %q: %w", at.Child("runtimeClassName"), p.Class, errs.ErrInvalid)
	}
	if p.Class == oci.Runc && len(spec.Containers) > 1 { // of this server's default
		return Plan{}, fmt.Errorf("%s: class runc has one container in a sandbox; set runtimeClassName gvisor: %w", at.Child("containers").Index(1), errs.ErrInvalid)
	}
	p.User, p.Security = security(spec, c, p.Class)
	p.NonRoot = nonRoot(spec, c)
	if err := p.setContainers(s, d.Limits, at); err != nil {
		return p, err
	}
	var err error
	if _, err = p.Egress(); err != nil {
		return Plan{}, err
	}
	if p.Volumes, err = volumes(s, c, at.Child("containers").Index(0)); err != nil {
		return p, err
	}
	p.Projections = projections(spec)
	p.SetOwn(s)
	return p, nil
}

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

// memoryPerProcess bounds the processes of a gVisor sandbox by its memory: an idle child of a shell takes 0.5
// to 0.7 MiB, and a sandbox without memory ends.
const memoryPerProcess = 1 << 20

// Processes is the limit of processes and threads per user in a gVisor sandbox.
func (p *Plan) Processes() int {
	return int(max(1, min(p.Limits.Pids, p.Limits.Memory/memoryPerProcess)))
}

func hostname(spec *corev1.PodSpec, name string) string {
	if spec.Hostname != "" {
		return spec.Hostname
	}
	return strings.TrimRight(name[:min(len(name), 63)], "-.")
}

// limits are the container's, with the node's defaults where it sets none.
func limits(l oci.Limits, c *corev1.Container) oci.Limits {
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

// security is the user of the entrypoint and the privileges of its processes.
//
// Under gVisor setuid programs work unless allowPrivilegeEscalation is false: they gain privileges only in
// the sandbox's own kernel, whose process on the host can gain none, and users expect sudo. Under runc they
// would gain privileges in the host's kernel: there they work only if the template requests it.
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
			// The agent needs these to switch to the sandbox's users and manage their processes.
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

// SetNetwork copies an object's egress policy.
func (p *Plan) SetNetwork(s *agents.Sandbox) {
	p.Network, p.NetworkPolicy = nil, nil
	if b := s.Spec.Barchan; b != nil {
		p.Network, p.NetworkPolicy = b.Network.DeepCopy(), b.NetworkPolicy.DeepCopy()
	}
}

// Egress is the sandbox's egress policy. The error is an errs.ErrInvalid that names the field.
func (p *Plan) Egress() (egress.Policy, error) {
	own, err := egress.Compile(p.Network)
	if err != nil {
		return own, fmt.Errorf("spec.barchan.network.%w", err)
	}
	if own, err = own.Within(p.NetworkPolicy); err != nil {
		return own, fmt.Errorf("spec.barchan: %w", err)
	}
	return own, nil
}

// Restoring is the checkpoint that a sandbox is created from.
type Restoring struct {
	Checkpoint types.UID `json:"checkpoint"`
	FilesOnly  bool      `json:"filesOnly,omitempty"`
}

// setDisk takes the sizes of disks from an object: the limits of its containers are one, as on Kubernetes.
func (p *Plan) setDisk(s *agents.Sandbox) {
	for i := range s.Spec.PodTemplate.Spec.Containers {
		q := s.Spec.PodTemplate.Spec.Containers[i].Resources.Limits[corev1.ResourceEphemeralStorage]
		p.Disk += q.Value()
	}
	for i := range s.Spec.VolumeClaimTemplates {
		if p.ClaimSizes == nil {
			p.ClaimSizes = map[string]int64{}
		}
		c := &s.Spec.VolumeClaimTemplates[i]
		q := c.Spec.Resources.Requests[corev1.ResourceStorage]
		p.ClaimSizes[c.Name] = q.Value()
	}
}
