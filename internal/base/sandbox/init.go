package sandbox

import (
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
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

// maxInit limits the init containers of a sandbox.
const maxInit = 20

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
