package pool

import (
	"reflect"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// The functions of this file bring parts of a template into the canonical form of [Revision], whose
// comment lists the rules. They modify their arguments.

// fill sets a field to its default if empty.
func fill[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// fillPointer sets an optional field to its default if nil.
func fillPointer[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

// strip removes an optional field that equals its default.
func strip[T any](field **T, value T) {
	if *field != nil && reflect.DeepEqual(**field, value) {
		*field = nil
	}
}

func canonPod(s *corev1.PodSpec) {
	tidy(s)
	fill(&s.DNSPolicy, corev1.DNSClusterFirst)
	fill(&s.SchedulerName, corev1.DefaultSchedulerName)
	fill(&s.ServiceAccountName, s.DeprecatedServiceAccount)
	fill(&s.ServiceAccountName, "default")
	s.DeprecatedServiceAccount = ""
	fillPointer(&s.TerminationGracePeriodSeconds, corev1.DefaultTerminationGracePeriodSeconds)
	fillPointer(&s.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	fillPointer(&s.AutomountServiceAccountToken, false)
	strip(&s.ShareProcessNamespace, false)
	strip(&s.SetHostnameAsFQDN, false)
	strip(&s.HostUsers, true)
	strip(&s.PreemptionPolicy, corev1.PreemptLowerPriority)
	strip(&s.RuntimeClassName, "")
	strip(&s.SecurityContext, corev1.PodSecurityContext{})
	strip(&s.DNSConfig, corev1.PodDNSConfig{})
	strip(&s.Affinity, corev1.Affinity{})
	for i := range s.InitContainers {
		canonContainer(&s.InitContainers[i])
	}
	for i := range s.Containers {
		canonContainer(&s.Containers[i])
	}
}

func canonContainer(c *corev1.Container) {
	fill(&c.ImagePullPolicy, corev1.PullIfNotPresent)
	fill(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	fill(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for i := range c.Ports {
		fill(&c.Ports[i].Protocol, corev1.ProtocolTCP)
	}
	for i := range c.Env {
		if from := c.Env[i].ValueFrom; from != nil && from.FieldRef != nil {
			fill(&from.FieldRef.APIVersion, "v1")
		}
	}
	for _, p := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
		canonProbe(p)
	}
	if s := c.SecurityContext; s != nil {
		strip(&s.Capabilities, corev1.Capabilities{})
		strip(&s.Privileged, false)
		strip(&s.ReadOnlyRootFilesystem, false)
		strip(&s.ProcMount, corev1.DefaultProcMount)
	}
	strip(&c.SecurityContext, corev1.SecurityContext{})
}

func canonProbe(p *corev1.Probe) {
	if p == nil {
		return
	}
	fill(&p.TimeoutSeconds, 1)
	fill(&p.PeriodSeconds, 10)
	fill(&p.SuccessThreshold, 1)
	fill(&p.FailureThreshold, 3)
	if g := p.HTTPGet; g != nil {
		fill(&g.Scheme, corev1.URISchemeHTTP)
		fill(&g.Path, "/")
	}
}

func canonClaim(c *agents.PersistentVolumeClaimTemplate) {
	c.EmbeddedObjectMetadata = agents.EmbeddedObjectMetadata{Name: c.Name}
	fillPointer(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
}

func canonPolicyPorts(ports []networkingv1.NetworkPolicyPort) {
	for i := range ports {
		fillPointer(&ports[i].Protocol, corev1.ProtocolTCP)
	}
}

// canonReach returns nil for a policy that equals none.
func canonReach(e *agents.EgressPolicy) *agents.EgressPolicy {
	if e == nil {
		return nil
	}
	fillPointer(&e.Internet, true)
	if *e.Internet && len(e.AllowOut)+len(e.DenyOut) == 0 {
		return nil
	}
	return e
}

// tidy makes empty lists and maps nil and quantities canonical, everywhere in the pointer's target.
func tidy(to any) { tidyValue(reflect.ValueOf(to).Elem()) }

func tidyValue(v reflect.Value) {
	if q, ok := reflect.TypeAssert[*resource.Quantity](v.Addr()); ok {
		*q = *resource.NewDecimalQuantity(*q.AsDec(), resource.DecimalSI)
		return
	}
	switch v.Kind() { //nolint:exhaustive // the others have no parts
	case reflect.Pointer:
		if !v.IsNil() {
			tidyValue(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				tidyValue(v.Field(i))
			}
		}
	case reflect.Slice:
		if v.Len() == 0 {
			v.SetZero()
		}
		for i := range v.Len() {
			tidyValue(v.Index(i))
		}
	case reflect.Map:
		if v.Len() == 0 {
			v.SetZero()
			return
		}
		for _, k := range v.MapKeys() {
			e := reflect.New(v.Type().Elem()).Elem()
			e.Set(v.MapIndex(k))
			tidyValue(e)
			v.SetMapIndex(k, e)
		}
	default:
	}
}
