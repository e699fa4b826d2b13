package sandbox

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func runnable(change func(*corev1.PodSpec, *corev1.Container)) *corev1.PodSpec {
	spec := &corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "img"}}}
	if change != nil {
		change(spec, &spec.Containers[0])
	}
	return spec
}

func TestCheckRunnableAccepts(t *testing.T) {
	yes, no, uid, grace, class := true, false, int64(1000), int64(30), "gvisor"
	size := resource.MustParse("1Gi")
	for name, change := range map[string]func(*corev1.PodSpec, *corev1.Container){
		"the least": nil,
		"all that is honoured": func(p *corev1.PodSpec, c *corev1.Container) {
			c.Command, c.Args, c.WorkingDir = []string{"a"}, []string{"b"}, "/w"
			c.Env = []corev1.EnvVar{
				{Name: "A", Value: "b"},
				{Name: "N", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			}
			c.Resources = corev1.ResourceRequirements{
				Limits:   corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("1Gi")},
				Requests: corev1.ResourceList{"cpu": resource.MustParse("100m"), "memory": resource.MustParse("1Mi"), "ephemeral-storage": resource.MustParse("1Gi")},
			}
			c.Ports = []corev1.ContainerPort{{Name: "web", ContainerPort: 80}}
			c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("web")}}}
			c.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
			c.StartupProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}}
			p.Volumes = []corev1.Volume{
				{Name: "d", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				{Name: "m", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: &size}}},
			}
			c.VolumeMounts = []corev1.VolumeMount{{Name: "d", MountPath: "/d", SubPath: "a/b", ReadOnly: true}, {Name: "claim", MountPath: "/c"}}
			p.RuntimeClassName, p.Hostname, p.RestartPolicy = &class, "desk", corev1.RestartPolicyOnFailure
			p.DNSPolicy, p.DNSConfig = corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1"}}
			c.SecurityContext = &corev1.SecurityContext{
				RunAsUser: &uid, RunAsGroup: &uid, RunAsNonRoot: &yes, Privileged: &no, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
				Capabilities:   &corev1.Capabilities{Add: []corev1.Capability{"NET_BIND_SERVICE"}, Drop: []corev1.Capability{"ALL"}},
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			}
		},
		"hints for a scheduler": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.NodeSelector, p.Affinity, p.Tolerations = map[string]string{"a": "b"}, &corev1.Affinity{}, []corev1.Toleration{{Key: "k"}}
			p.PriorityClassName, p.ServiceAccountName, p.AutomountServiceAccountToken = "high", "sa", &no
			p.TerminationGracePeriodSeconds, p.EnableServiceLinks, p.SchedulerName = &grace, &no, "other"
			p.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{TopologyKey: "zone", LabelSelector: &metav1.LabelSelector{}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			if errs := CheckRunnable(runnable(change), field.NewPath("spec")); len(errs) > 0 {
				t.Errorf("refused: %v", errs)
			}
		})
	}
}

func TestCheckRunnableRefusesByName(t *testing.T) {
	yes, no, root, huge, deadline, class := true, false, int64(0), int64(1)<<40, int64(1), "kata"
	size := resource.MustParse("1Gi")
	bidirectional := corev1.MountPropagationBidirectional
	for at, change := range map[string]func(*corev1.PodSpec, *corev1.Container){
		"containers": func(p *corev1.PodSpec, _ *corev1.Container) { p.Containers = nil },
		"containers[1].image": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Containers = append(p.Containers, corev1.Container{Name: "b"})
		},
		"containers[1].name": func(p *corev1.PodSpec, _ *corev1.Container) { p.Containers = append(p.Containers, p.Containers[0]) },
		"containers[1]": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Containers, p.RuntimeClassName = append(p.Containers, corev1.Container{Name: "b", Image: "img"}), new("runc")
		},
		"initContainers[0].name": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.InitContainers = []corev1.Container{{Name: "main", Image: "img"}}
		},
		"initContainers": func(p *corev1.PodSpec, _ *corev1.Container) { p.InitContainers = make([]corev1.Container, 21) },
		"initContainers[0].readinessProbe": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.InitContainers = []corev1.Container{{Name: "a", Image: "img", ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}}}
		},
		"initContainers[0].restartPolicy": func(p *corev1.PodSpec, _ *corev1.Container) {
			always := corev1.ContainerRestartPolicyAlways
			p.InitContainers = []corev1.Container{{Name: "a", Image: "img", RestartPolicy: &always}}
		},
		"initContainers[0].resources.limits[memory]": func(p *corev1.PodSpec, c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("128Mi")}
			p.InitContainers = []corev1.Container{{Name: "a", Image: "img", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"memory": size}}}}
		},
		"ephemeralContainers":      func(p *corev1.PodSpec, _ *corev1.Container) { p.EphemeralContainers = []corev1.EphemeralContainer{{}} },
		"hostNetwork":              func(p *corev1.PodSpec, _ *corev1.Container) { p.HostNetwork = true },
		"hostPID":                  func(p *corev1.PodSpec, _ *corev1.Container) { p.HostPID = true },
		"hostIPC":                  func(p *corev1.PodSpec, _ *corev1.Container) { p.HostIPC = true },
		"hostUsers":                func(p *corev1.PodSpec, _ *corev1.Container) { p.HostUsers = &no },
		"shareProcessNamespace":    func(p *corev1.PodSpec, _ *corev1.Container) { p.ShareProcessNamespace = &yes },
		"runtimeClassName":         func(p *corev1.PodSpec, _ *corev1.Container) { p.RuntimeClassName = &class },
		"os.name":                  func(p *corev1.PodSpec, _ *corev1.Container) { p.OS = &corev1.PodOS{Name: corev1.Windows} },
		"restartPolicy":            func(p *corev1.PodSpec, _ *corev1.Container) { p.RestartPolicy = "Sometimes" },
		"activeDeadlineSeconds":    func(p *corev1.PodSpec, _ *corev1.Container) { p.ActiveDeadlineSeconds = &deadline },
		"imagePullSecrets[0].name": func(p *corev1.PodSpec, _ *corev1.Container) { p.ImagePullSecrets = []corev1.LocalObjectReference{{}} },
		"resourceClaims":           func(p *corev1.PodSpec, _ *corev1.Container) { p.ResourceClaims = []corev1.PodResourceClaim{{}} },
		"resources":                func(p *corev1.PodSpec, _ *corev1.Container) { p.Resources = &corev1.ResourceRequirements{} },
		"hostname":                 func(p *corev1.PodSpec, _ *corev1.Container) { p.Hostname = "No!" },
		"dnsConfig.nameservers":    func(p *corev1.PodSpec, _ *corev1.Container) { p.DNSPolicy = corev1.DNSNone },
		"securityContext.supplementalGroups": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.SecurityContext = &corev1.PodSecurityContext{SupplementalGroups: []int64{1}}
		},
		"securityContext.sysctls": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{}}}
		},
		"securityContext.seccompProfile.type": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost}}
		},
		"volumes[0].hostPath": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{}}}}
		},
		"volumes[0].configMap.name": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}}}
		},
		"volumes[0].name": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Volumes = []corev1.Volume{{Name: "../v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		},
		"volumes[0].emptyDir.sizeLimit": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: &size}}}}
		},
		"volumes[0].emptyDir.medium": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumHugePages}}}}
		},
		"containers[0].image":             func(_ *corev1.PodSpec, c *corev1.Container) { c.Image = "" },
		"containers[0].envFrom[0]":        func(_ *corev1.PodSpec, c *corev1.Container) { c.EnvFrom = []corev1.EnvFromSource{{}} },
		"containers[0].env[0].name":       func(_ *corev1.PodSpec, c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: "A=B"}} },
		"containers[0].env[0].value":      func(_ *corev1.PodSpec, c *corev1.Container) { c.Env = []corev1.EnvVar{{Name: "A", Value: "\x00"}} },
		"containers[0].workingDir":        func(_ *corev1.PodSpec, c *corev1.Container) { c.WorkingDir = "rel" },
		"containers[0].ports[0].hostPort": func(_ *corev1.PodSpec, c *corev1.Container) { c.Ports = []corev1.ContainerPort{{HostPort: 1}} },
		"containers[0].volumeDevices":     func(_ *corev1.PodSpec, c *corev1.Container) { c.VolumeDevices = []corev1.VolumeDevice{{}} },
		"containers[0].lifecycle":         func(_ *corev1.PodSpec, c *corev1.Container) { c.Lifecycle = &corev1.Lifecycle{} },
		"containers[0].livenessProbe.grpc": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{}}}
		},
		"containers[0].startupProbe": func(_ *corev1.PodSpec, c *corev1.Container) { c.StartupProbe = &corev1.Probe{} },
		"containers[0].env[0].valueFrom.secretKeyRef.name": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}}}
		},
		"containers[0].env[0].valueFrom.fieldRef.fieldPath": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.x"}}}}
		},
		"containers[0].resources.limits[nvidia.com/gpu]": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		},
		"containers[0].resources.limits[hugepages-2Mi]": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi")}
		},
		"containers[0].resources.limits[memory]": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("1Mi")}
		},
		"containers[0].resources.requests[cpu]": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("-1")}
		},
		"containers[0].readinessProbe.httpGet.port": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("none")}}}
		},
		"containers[0].readinessProbe.tcpSocket.host": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(1), Host: "10.0.0.1"}}}
		},
		"containers[0].volumeMounts[0].mountPath": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.VolumeMounts = []corev1.VolumeMount{{MountPath: "/.barchan/x"}}
		},
		"containers[0].volumeMounts[0].subPath": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.VolumeMounts = []corev1.VolumeMount{{MountPath: "/x", SubPath: "../y"}}
		},
		"containers[0].volumeMounts[0].subPathExpr": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.VolumeMounts = []corev1.VolumeMount{{MountPath: "/x", SubPathExpr: "$(A)"}}
		},
		"containers[0].volumeMounts[0].mountPropagation": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.VolumeMounts = []corev1.VolumeMount{{MountPath: "/x", MountPropagation: &bidirectional}}
		},
		"containers[0].securityContext.privileged": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		},
		"containers[0].securityContext.capabilities.add[0]": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}}
		},
		"containers[0].securityContext.runAsUser": func(_ *corev1.PodSpec, c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{RunAsUser: &root, RunAsNonRoot: &yes}
		},
		"securityContext.runAsUser": func(p *corev1.PodSpec, _ *corev1.Container) {
			p.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &huge}
		},
	} {
		t.Run(at, func(t *testing.T) {
			errs := CheckRunnable(runnable(change), field.NewPath("spec"))
			named := slices.ContainsFunc(errs, func(e *field.Error) bool { return e.Field == "spec."+at })
			if !named || len(errs) != 1 {
				t.Errorf("errors %v, want one that names spec.%s", errs, at)
			}
		})
	}
}
