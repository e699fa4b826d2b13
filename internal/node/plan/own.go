package plan

import (
	"math"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/podsource"
)

// Own has parts of the object that variables and files may refer to.
type Own struct {
	Labels         map[string]string   `json:"labels,omitempty"`
	Annotations    map[string]string   `json:"annotations,omitempty"`
	ServiceAccount string              `json:"serviceAccount,omitempty"`
	Requests       corev1.ResourceList `json:"requests,omitempty"`
	Storage        resource.Quantity   `json:"storage,omitzero"`
	// Group owns the files of projected volumes; 0: root.
	Group int64 `json:"group,omitempty"`
}

// Projection is a volume of Secrets, ConfigMaps and the object's fields.
type Projection struct {
	Name   string                       `json:"name"`
	Source corev1.ProjectedVolumeSource `json:"source"`
}

func projections(spec *corev1.PodSpec) (all []Projection) {
	for i := range spec.Volumes {
		if p := podsource.Projected(&spec.Volumes[i]); p != nil {
			all = append(all, Projection{spec.Volumes[i].Name, *p.DeepCopy()})
		}
	}
	return all
}

// SetOwn copies what the plan refers to of an object, as it is now.
func (p *Plan) SetOwn(s *agents.Sandbox) {
	p.Own = nil
	refers := len(p.Projections) > 0
	for _, e := range p.Env {
		refers = refers || e.ValueFrom != nil
	}
	p.each(func(c *Container) {
		for _, e := range c.Env {
			refers = refers || e.ValueFrom != nil
		}
	})
	if !refers {
		return
	}
	pod := &s.Spec.PodTemplate
	o := &Own{Labels: pod.ObjectMeta.Labels, Annotations: pod.ObjectMeta.Annotations, ServiceAccount: pod.Spec.ServiceAccountName}
	if c := pod.Spec.Containers; len(c) > 0 {
		o.Requests, o.Storage = c[0].Resources.Requests, c[0].Resources.Limits[corev1.ResourceEphemeralStorage]
	}
	if sc := pod.Spec.SecurityContext; sc != nil {
		o.Group = ptr.Deref(sc.FSGroup, 0)
	}
	p.Own = o
}

// RefersToObjects reports whether the environment or the volumes need Secrets or ConfigMaps.
func (p *Plan) RefersToObjects() bool {
	if len(p.Projections) > 0 || refersToObjects(p.Env, p.EnvFrom) {
		return true
	}
	return slices.ContainsFunc(p.Sidecars, func(c Container) bool { return refersToObjects(c.Env, c.EnvFrom) })
}

func refersToObjects(env []corev1.EnvVar, from []corev1.EnvFromSource) bool {
	return len(from) > 0 || slices.ContainsFunc(env, func(e corev1.EnvVar) bool {
		return e.ValueFrom != nil && (e.ValueFrom.SecretKeyRef != nil || e.ValueFrom.ConfigMapKeyRef != nil)
	})
}

// Fields are the object's fields as variables and files of a sandbox at an address of a node see them.
func (p *Plan) Fields(address netip.Addr, node string) podsource.Fields {
	return fields{p, address, node}
}

type fields struct {
	p       *Plan
	address netip.Addr
	node    string
}

func (f fields) own() *Own {
	if f.p.Own == nil {
		return &Own{}
	}
	return f.p.Own
}

// Field implements podsource.Fields. The specification was validated.
func (f fields) Field(path string) string {
	of, key, single := podsource.Subscript(path)
	if !single {
		of = path
	}
	switch of {
	case "metadata.name":
		return f.p.Ref.Name
	case "metadata.namespace":
		return f.p.Ref.Namespace
	case "metadata.uid":
		return string(f.p.Ref.UID)
	case "metadata.labels":
		return entry(f.own().Labels, key, single)
	case "metadata.annotations":
		return entry(f.own().Annotations, key, single)
	case "spec.nodeName":
		return f.node
	case "spec.serviceAccountName":
		return f.own().ServiceAccount
	default: // status.podIP
		return f.address.String()
	}
}

func entry(m map[string]string, key string, single bool) string {
	if single {
		return m[key]
	}
	return podsource.Map(m)
}

// Resource implements podsource.Fields. Limits that the template does not set are the node's.
func (f fields) Resource(ref *corev1.ResourceFieldSelector) string {
	l := &f.p.Limits
	switch ref.Resource {
	case "limits.cpu":
		return inUnits(l.MilliCPU, ref.Divisor.MilliValue(), 1000)
	case "limits.memory":
		return inUnits(l.Memory, ref.Divisor.Value(), 1)
	case "limits.ephemeral-storage":
		return inUnits(f.own().Storage.Value(), ref.Divisor.Value(), 1)
	case "requests.cpu":
		return inUnits(l.CPUShares, ref.Divisor.MilliValue(), 1000)
	case "requests.memory":
		q := f.own().Requests[corev1.ResourceMemory]
		return inUnits(q.Value(), ref.Divisor.Value(), 1)
	default: // requests.ephemeral-storage
		q := f.own().Requests[corev1.ResourceEphemeralStorage]
		return inUnits(q.Value(), ref.Divisor.Value(), 1)
	}
}

// inUnits divides, rounded up; 0 stands for one unit.
func inUnits(n, divisor, unit int64) string {
	if divisor == 0 {
		divisor = unit
	}
	return strconv.FormatInt(int64(math.Ceil(float64(n)/float64(divisor))), 10)
}
