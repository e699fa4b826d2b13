package sandbox

import (
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// ErrInit is in the chain of the errors that InitFailed marks.
var ErrInit = errors.New("init container failed")

// InitFailed marks the error of an init container that has ended with another code than 0. Its text and its kind stay.
func InitFailed(err error) error { return markedError{err, ErrInit} }

// Reasons of condition Ready, in kubectl's words.
const (
	// ReasonInitializing is that of a sandbox whose init containers run.
	ReasonInitializing = "PodInitializing"
	// ReasonInitFailed is that of a sandbox that is created again, because an init container has failed.
	ReasonInitFailed = "Init:CrashLoopBackOff"
	// ReasonInitError is that of a sandbox that has ended with its init container.
	ReasonInitError = "Init:Error"
)

// maxInit and maxContainers limit the containers of a sandbox.
const (
	maxInit       = 20
	maxContainers = 10
)

// checkContainers reports what is wrong with the containers of a Pod. The first is the sandbox's own, which clients reach.
func checkContainers(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	if n := len(spec.Containers); n > maxContainers {
		return field.ErrorList{field.TooMany(at, n, maxContainers)}
	}
	names := map[string]bool{}
	for i := range spec.Containers {
		c, where := &spec.Containers[i], at.Index(i)
		if len(spec.Containers) > 1 {
			for _, problem := range validation.IsDNS1123Label(c.Name) {
				errs = append(errs, field.Invalid(where.Child("name"), c.Name, problem))
			}
			if names[c.Name] {
				errs = append(errs, field.Duplicate(where.Child("name"), c.Name))
			}
			names[c.Name] = true
		}
		for j, m := range c.VolumeMounts {
			if _, shared := ClaimOf(spec, m.Name); shared && m.SubPath != "" {
				// Its path could be replaced by a link while it is resolved.
				errs = append(errs, unsupported(where.Child("volumeMounts").Index(j).Child("subPath"), "mount all of a volume that other sandboxes write"))
			}
		}
		errs = append(errs, checkContainer(c, where)...)
	}
	if class := spec.RuntimeClassName; len(spec.Containers) > 1 && class != nil && *class == agents.RuntimeRunc {
		errs = append(errs, field.Forbidden(at.Index(1), "class runc has one container in a sandbox; several need class gvisor, whose kernel they share"))
	}
	return errs
}

// checkInit reports what is wrong with the init containers of a Pod.
func checkInit(spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	if len(spec.InitContainers) > maxInit {
		return field.ErrorList{field.TooMany(at, len(spec.InitContainers), maxInit)}
	}
	names := map[string]bool{}
	for i := range spec.Containers {
		names[spec.Containers[i].Name] = true
	}
	for i := range spec.InitContainers {
		c, where := &spec.InitContainers[i], at.Index(i)
		for _, problem := range validation.IsDNS1123Label(c.Name) {
			errs = append(errs, field.Invalid(where.Child("name"), c.Name, problem))
		}
		if names[c.Name] {
			errs = append(errs, field.Duplicate(where.Child("name"), c.Name))
		}
		names[c.Name] = true
		for name, p := range map[string]*corev1.Probe{"livenessProbe": c.LivenessProbe, "readinessProbe": c.ReadinessProbe, "startupProbe": c.StartupProbe} {
			if p != nil {
				errs = append(errs, field.Forbidden(where.Child(name), "may not be set for init containers"))
			}
		}
		errs = append(errs, checkContainer(c, where)...)
		errs = append(errs, checkInitLimits(c, spec, where.Child("resources", "limits"))...)
	}
	return errs
}

// checkInitLimits requires that an init container has no more than the sandbox, which quotas count.
func checkInitLimits(c *corev1.Container, spec *corev1.PodSpec, at *field.Path) (errs field.ErrorList) {
	if len(spec.Containers) == 0 {
		return nil
	}
	for name, q := range c.Resources.Limits {
		if most, set := spec.Containers[0].Resources.Limits[name]; set && q.Cmp(most) > 0 {
			errs = append(errs, field.Invalid(at.Key(string(name)), q.String(), "must be at most that of the sandbox's container, "+most.String()))
		}
	}
	return errs
}
