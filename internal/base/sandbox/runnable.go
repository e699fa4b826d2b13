package sandbox

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/podsource"
)

// grantable are the capabilities that a template may add to the default set. All of them act within
// the sandbox's own namespaces.
var grantable = []string{
	"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID",
	"SETPCAP", "SETUID", "SYS_CHROOT", "SYS_PTRACE",
}

// reserved is the directory of the agent inside a sandbox.
const reserved = "/.barchan"

// CheckRunnable reports the parts of a Pod specification that a single node cannot honour, so that it
// is rejected at once and never partly applied. No errors means that all of it is honoured.
//
// Honoured: containers, and init containers before them, with image, command, args, env and envFrom (see package podsource), workingDir,
// limits and requests of CPU and memory, limits of ephemeral storage, exec, httpGet and tcpSocket probes, volumes of emptyDir, configMap,
// secret, projected and downwardAPI, Volumes by persistentVolumeClaim, volume claims, all with subPath and readOnly,
// runtimeClassName gvisor or runc, the user, group,
// escalation, capabilities and read-only root of a security context, hostname, hostAliases,
// dnsPolicy, dnsConfig, restartPolicy for the entrypoint, imagePullPolicy and imagePullSecrets.
//
// Accepted without effect, because they are hints or a single machine has no choice: nodeSelector,
// nodeName, affinity, tolerations, topologySpreadConstraints, priority
// and priorityClassName, preemptionPolicy, schedulerName, schedulingGates, readinessGates,
// serviceAccountName and automountServiceAccountToken (there are no such tokens here),
// enableServiceLinks, container ports and their names, subdomain, setHostnameAsFQDN, stdin and
// tty, termination messages, terminationGracePeriodSeconds (a sandbox is not drained), os
// linux, overhead, and seccomp and AppArmor profiles named RuntimeDefault or Unconfined (the
// node's own is always in force).
func CheckRunnable(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	errs = append(errs, checkInit(spec, at.Child("initContainers"))...)
	if len(spec.EphemeralContainers) > 0 {
		errs = append(errs, unsupported(at.Child("ephemeralContainers"), "run commands in the sandbox instead"))
	}
	errs = append(errs, checkHost(spec, at)...)
	errs = append(errs, checkPod(spec, at)...)
	errs = append(errs, checkVolumes(spec, at.Child("volumes"))...)
	if len(spec.Containers) == 0 {
		return append(errs, field.Required(at.Child("containers"), "name one container"))
	}
	return append(errs, checkContainers(spec, at.Child("containers"))...)
}

func unsupported(at *field.Path, advice string) *field.Error {
	return field.Forbidden(at, "is not supported on one machine: "+advice)
}

// checkHost rejects settings that open the machine to the sandbox.
func checkHost(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	for name, set := range map[string]bool{
		"hostNetwork": spec.HostNetwork, "hostPID": spec.HostPID, "hostIPC": spec.HostIPC,
	} {
		if set {
			errs = append(errs, field.Forbidden(at.Child(name), "a sandbox never shares the machine's namespaces"))
		}
	}
	if spec.HostUsers != nil && !*spec.HostUsers {
		errs = append(errs, unsupported(at.Child("hostUsers"), "leave it unset; gVisor separates users on its own"))
	}
	if spec.ShareProcessNamespace != nil && *spec.ShareProcessNamespace {
		errs = append(errs, unsupported(at.Child("shareProcessNamespace"), "containers share the network and volumes, not their processes"))
	}
	slices.SortFunc(errs, func(a, b *field.Error) int { return strings.Compare(a.Field, b.Field) })
	return errs
}

func checkPod(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	if c := spec.RuntimeClassName; c != nil && *c != "" && *c != agents.RuntimeGVisor && *c != agents.RuntimeRunc {
		errs = append(errs, field.NotSupported(at.Child("runtimeClassName"), *c, []string{agents.RuntimeGVisor, agents.RuntimeRunc}))
	}
	if spec.OS != nil && spec.OS.Name != corev1.Linux {
		errs = append(errs, field.NotSupported(at.Child("os", "name"), spec.OS.Name, []corev1.OSName{corev1.Linux}))
	}
	if !slices.Contains([]corev1.RestartPolicy{"", corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}, spec.RestartPolicy) {
		errs = append(errs, field.NotSupported(at.Child("restartPolicy"), spec.RestartPolicy, []corev1.RestartPolicy{corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}))
	}
	if spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, unsupported(at.Child("activeDeadlineSeconds"), "set spec.shutdownTime"))
	}
	errs = append(errs, CheckPullSecrets(spec.ImagePullSecrets, at.Child("imagePullSecrets"))...)
	if len(spec.ResourceClaims) > 0 {
		errs = append(errs, unsupported(at.Child("resourceClaims"), "there are no devices to claim"))
	}
	if spec.Resources != nil {
		errs = append(errs, unsupported(at.Child("resources"), "set the container's resources"))
	}
	errs = append(errs, checkNames(spec, at)...)
	return append(errs, checkPodSecurity(spec.SecurityContext, at.Child("securityContext"))...)
}

// maxPullSecrets bounds the Secrets that are read for an image.
const maxPullSecrets = 16

// CheckPullSecrets checks names of Secrets with credentials for images.
func CheckPullSecrets(refs []corev1.LocalObjectReference, at *field.Path) (errs field.ErrorList) {
	if n := len(refs); n > maxPullSecrets {
		errs = append(errs, field.TooMany(at, n, maxPullSecrets))
	}
	for i, ref := range refs {
		for _, problem := range validation.IsDNS1123Subdomain(ref.Name) {
			errs = append(errs, field.Invalid(at.Index(i).Child("name"), ref.Name, problem))
		}
	}
	return errs
}

// checkNames checks the sandbox's own name and its name resolution.
func checkNames(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	if spec.Hostname != "" {
		for _, problem := range validation.IsDNS1123Label(spec.Hostname) {
			errs = append(errs, field.Invalid(at.Child("hostname"), spec.Hostname, problem))
		}
	}
	if p := spec.DNSPolicy; p == corev1.DNSNone && (spec.DNSConfig == nil || len(spec.DNSConfig.Nameservers) == 0) {
		errs = append(errs, field.Required(at.Child("dnsConfig", "nameservers"), "dnsPolicy None needs at least one"))
	}
	return errs
}

func checkPodSecurity(s *corev1.PodSecurityContext, at *field.Path) (errs field.ErrorList) {
	if s == nil {
		return nil
	}
	if len(s.SupplementalGroups) > 0 {
		errs = append(errs, unsupported(at.Child("supplementalGroups"), "put the user into its groups in the image"))
	}
	if len(s.Sysctls) > 0 {
		errs = append(errs, unsupported(at.Child("sysctls"), "set them in the sandbox"))
	}
	if s.SELinuxOptions != nil {
		errs = append(errs, unsupported(at.Child("seLinuxOptions"), "leave it unset"))
	}
	errs = append(errs, checkProfiles(s.SeccompProfile, s.AppArmorProfile, at)...)
	return append(errs, checkUser(s.RunAsUser, s.RunAsNonRoot, at)...)
}

func checkProfiles(seccomp *corev1.SeccompProfile, apparmor *corev1.AppArmorProfile, at *field.Path) (errs field.ErrorList) {
	if seccomp != nil && seccomp.Type == corev1.SeccompProfileTypeLocalhost {
		errs = append(errs, unsupported(at.Child("seccompProfile", "type"), "use RuntimeDefault"))
	}
	if apparmor != nil && apparmor.Type == corev1.AppArmorProfileTypeLocalhost {
		errs = append(errs, unsupported(at.Child("appArmorProfile", "type"), "use RuntimeDefault"))
	}
	return errs
}

// checkUser rejects a user that contradicts runAsNonRoot. If the image names the user, the template
// must repeat it, because the image is read only after the sandbox was accepted.
func checkUser(uid *int64, nonRoot *bool, at *field.Path) (errs field.ErrorList) {
	if uid != nil && (*uid < 0 || *uid > 1<<32-2) {
		errs = append(errs, field.Invalid(at.Child("runAsUser"), *uid, "must be between 0 and 4294967294"))
	}
	if nonRoot != nil && *nonRoot && uid != nil && *uid == 0 {
		errs = append(errs, field.Invalid(at.Child("runAsUser"), *uid, "must not be 0 with runAsNonRoot"))
	}
	return errs
}

func checkContainer(c *corev1.Container, at *field.Path) (errs field.ErrorList) {
	if c.Image == "" {
		errs = append(errs, field.Required(at.Child("image"), "name the image to run"))
	}
	errs = append(errs, podsource.CheckEnv(c, at)...)
	if c.WorkingDir != "" && !path.IsAbs(c.WorkingDir) {
		errs = append(errs, field.Invalid(at.Child("workingDir"), c.WorkingDir, "must be an absolute path"))
	}
	for i, p := range c.Ports {
		if p.HostPort != 0 {
			errs = append(errs, field.Forbidden(at.Child("ports").Index(i).Child("hostPort"), "reach the port through the gateway"))
		}
	}
	if len(c.VolumeDevices) > 0 {
		errs = append(errs, unsupported(at.Child("volumeDevices"), "mount a volume instead"))
	}
	if c.Lifecycle != nil {
		errs = append(errs, unsupported(at.Child("lifecycle"), "put the work into the entrypoint"))
	}
	if c.RestartPolicy != nil || len(c.RestartPolicyRules) > 0 {
		errs = append(errs, unsupported(at.Child("restartPolicy"), "set the Pod's restartPolicy"))
	}
	errs = append(errs, checkResources(c.Resources, at.Child("resources"))...)
	for i, m := range c.VolumeMounts {
		errs = append(errs, checkMount(m, at.Child("volumeMounts").Index(i))...)
	}
	for name, p := range map[string]*corev1.Probe{"livenessProbe": c.LivenessProbe, "readinessProbe": c.ReadinessProbe, "startupProbe": c.StartupProbe} {
		errs = append(errs, checkProbe(p, c.Ports, at.Child(name))...)
	}
	errs = append(errs, checkSecurity(c.SecurityContext, at.Child("securityContext"))...)
	slices.SortStableFunc(errs, func(a, b *field.Error) int { return strings.Compare(a.Field, b.Field) })
	return errs
}

func checkResources(r corev1.ResourceRequirements, at *field.Path) (errs field.ErrorList) {
	for kind, list := range map[string]corev1.ResourceList{"limits": r.Limits, "requests": r.Requests} {
		for name, q := range list {
			where := at.Child(kind).Key(string(name))
			switch {
			case name == corev1.ResourceEphemeralStorage:
				errs = append(errs, checkDisk(q, kind, where)...)
			case name != corev1.ResourceCPU && name != corev1.ResourceMemory:
				errs = append(errs, unsupported(where, "only cpu, memory and ephemeral-storage can be bounded"))
			case q.Sign() <= 0:
				errs = append(errs, field.Invalid(where, q.String(), "must be positive"))
			case kind == "limits" && name == corev1.ResourceMemory && q.Value() < MinMemory:
				errs = append(errs, field.Invalid(where, q.String(), "must be at least 64Mi, which the runtime itself needs"))
			}
		}
	}
	if len(r.Claims) > 0 {
		errs = append(errs, unsupported(at.Child("claims"), "there are no devices to claim"))
	}
	return errs
}

func checkDisk(q resource.Quantity, kind string, at *field.Path) (errs field.ErrorList) {
	if kind == "limits" && (q.Value() < MinDisk || q.Value() > MaxDisk) {
		errs = append(errs, field.Invalid(at, q.String(), "must be from 16Mi to 8Ti"))
	}
	return errs
}

// MinMemory is the least limit of memory in bytes: below it, no runtime starts.
const MinMemory = 64 << 20

// MinDisk and MaxDisk bound the limit of ephemeral storage, in bytes.
const (
	MinDisk = 16 << 20
	MaxDisk = 8 << 40
)

func checkMount(m corev1.VolumeMount, at *field.Path) (errs field.ErrorList) {
	switch target := path.Clean(m.MountPath); {
	case !path.IsAbs(m.MountPath) || strings.ContainsRune(m.MountPath, 0):
		errs = append(errs, field.Invalid(at.Child("mountPath"), m.MountPath, "must be an absolute path"))
	case target == "/" || target == reserved || strings.HasPrefix(target, reserved+"/") ||
		slices.Contains([]string{"/proc", "/sys", "/dev"}, target):
		errs = append(errs, field.Invalid(at.Child("mountPath"), m.MountPath, "is the system's own"))
	}
	if path.IsAbs(m.SubPath) || slices.Contains(strings.Split(m.SubPath, "/"), "..") {
		errs = append(errs, field.Invalid(at.Child("subPath"), m.SubPath, "must be a relative path without .."))
	}
	if m.SubPathExpr != "" {
		errs = append(errs, unsupported(at.Child("subPathExpr"), "use subPath"))
	}
	if m.MountPropagation != nil && *m.MountPropagation != corev1.MountPropagationNone {
		errs = append(errs, unsupported(at.Child("mountPropagation"), "leave it unset"))
	}
	if m.RecursiveReadOnly != nil && *m.RecursiveReadOnly == corev1.RecursiveReadOnlyEnabled {
		errs = append(errs, unsupported(at.Child("recursiveReadOnly"), "use readOnly"))
	}
	return errs
}

func checkVolumes(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	main := ""
	if len(spec.Containers) > 0 {
		main = spec.Containers[0].Name
	}
	for i, v := range spec.Volumes {
		where := at.Index(i)
		projected := podsource.Projected(&v)
		switch {
		case projected != nil:
			errs = append(errs, podsource.CheckVolume(&v, projected, main, where)...)
		case v.HostPath != nil:
			errs = append(errs, field.Forbidden(where.Child("hostPath"), "a sandbox never sees the machine's files"))
		case v.PersistentVolumeClaim != nil:
			at := where.Child("persistentVolumeClaim", "claimName")
			for _, problem := range validation.IsDNS1123Label(v.PersistentVolumeClaim.ClaimName) {
				errs = append(errs, field.Invalid(at, v.PersistentVolumeClaim.ClaimName, problem))
			}
		case v.EmptyDir == nil:
			errs = append(errs, unsupported(where, "use emptyDir, configMap, secret, projected or downwardAPI, volumeClaimTemplates for what must last, or persistentVolumeClaim with the name of a Volume"))
		case v.EmptyDir.Medium != corev1.StorageMediumDefault && v.EmptyDir.Medium != corev1.StorageMediumMemory:
			errs = append(errs, field.NotSupported(where.Child("emptyDir", "medium"), v.EmptyDir.Medium, []corev1.StorageMedium{"", corev1.StorageMediumMemory}))
		case v.EmptyDir.SizeLimit != nil && v.EmptyDir.Medium != corev1.StorageMediumMemory:
			errs = append(errs, unsupported(where.Child("emptyDir", "sizeLimit"), "limits.ephemeral-storage of the container bounds all of them; or use medium Memory"))
		case v.EmptyDir.SizeLimit != nil && v.EmptyDir.SizeLimit.Sign() <= 0:
			errs = append(errs, field.Invalid(where.Child("emptyDir", "sizeLimit"), v.EmptyDir.SizeLimit.String(), "must be positive"))
		}
		if len(validation.IsDNS1123Label(v.Name)) > 0 {
			errs = append(errs, field.Invalid(where.Child("name"), v.Name, "must be a DNS label"))
		}
	}
	return errs
}

func checkProbe(p *corev1.Probe, ports []corev1.ContainerPort, at *field.Path) (errs field.ErrorList) {
	if p == nil {
		return nil
	}
	named := func(name string) bool {
		return slices.ContainsFunc(ports, func(c corev1.ContainerPort) bool { return c.Name == name })
	}
	switch {
	case p.GRPC != nil:
		errs = append(errs, unsupported(at.Child("grpc"), "use exec, httpGet or tcpSocket"))
	case p.HTTPGet != nil:
		if p.HTTPGet.Host != "" {
			errs = append(errs, unsupported(at.Child("httpGet", "host"), "the sandbox itself is probed"))
		}
		if port := p.HTTPGet.Port; port.IntValue() == 0 && !named(port.StrVal) {
			errs = append(errs, field.Invalid(at.Child("httpGet", "port"), port.String(), "must be a number or the name of one of the ports"))
		}
	case p.TCPSocket != nil:
		if p.TCPSocket.Host != "" {
			errs = append(errs, unsupported(at.Child("tcpSocket", "host"), "the sandbox itself is probed"))
		}
		if port := p.TCPSocket.Port; port.IntValue() == 0 && !named(port.StrVal) {
			errs = append(errs, field.Invalid(at.Child("tcpSocket", "port"), port.String(), "must be a number or the name of one of the ports"))
		}
	case p.Exec == nil || len(p.Exec.Command) == 0:
		errs = append(errs, field.Required(at, "name exec, httpGet or tcpSocket"))
	}
	return errs
}

func checkSecurity(s *corev1.SecurityContext, at *field.Path) (errs field.ErrorList) {
	if s == nil {
		return nil
	}
	if s.Privileged != nil && *s.Privileged {
		errs = append(errs, field.Forbidden(at.Child("privileged"), "a sandbox is never privileged"))
	}
	if s.Capabilities != nil {
		for i, c := range s.Capabilities.Add {
			name := strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_")
			if !slices.Contains(grantable, name) {
				errs = append(errs, field.NotSupported(at.Child("capabilities", "add").Index(i), c, grantable))
			}
		}
	}
	if s.SELinuxOptions != nil {
		errs = append(errs, unsupported(at.Child("seLinuxOptions"), "leave it unset"))
	}
	if s.ProcMount != nil && *s.ProcMount != corev1.DefaultProcMount {
		errs = append(errs, unsupported(at.Child("procMount"), "leave it unset"))
	}
	errs = append(errs, checkProfiles(s.SeccompProfile, s.AppArmorProfile, at)...)
	return append(errs, checkUser(s.RunAsUser, s.RunAsNonRoot, at)...)
}
