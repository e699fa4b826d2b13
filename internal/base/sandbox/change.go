package sandbox

import (
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

const (
	msgBegun = "cannot change once the node has begun the sandbox: it would not be applied; create another sandbox, or set spec.barchan.suspend to Delete, suspend this one, change it and resume it"
	msgEnded = "cannot change: the sandbox has ended; delete it and create another"
)

// CheckChange rejects changes of a Sandbox's Pod specification that would never be applied. at is its
// path.
//
// The environment of the container is applied to a running sandbox. All else is read when a sandbox is
// created: for the first time, after a failed create, or when it is resumed with nothing but its
// volumes, as with spec.barchan.suspend Delete.
func CheckChange(now, was *agents.Sandbox, at *field.Path) field.ErrorList {
	msg := msgBegun
	switch {
	case DeadForGood(was):
		msg = msgEnded
	case !begun(was), Suspended(was) && was.Spec.Barchan != nil && was.Spec.Barchan.Suspend == agents.SuspendDelete:
		return nil
	}
	to, from := &now.Spec.PodTemplate.Spec, &was.Spec.PodTemplate.Spec
	errs := changed(to, from, at, msg, "containers")
	if len(to.Containers) != len(from.Containers) {
		return append(errs, field.Forbidden(at.Child("containers"), msg))
	}
	for i := range to.Containers {
		errs = append(errs, changed(&to.Containers[i], &from.Containers[i], at.Child("containers").Index(i), msg, "env")...)
	}
	return errs
}

// begun reports whether a node has created a sandbox, or is creating it. After a failed attempt the
// next one reads the object again.
func begun(s *agents.Sandbox) bool {
	if HasRun(s) {
		return true
	}
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	return s.Status.NodeName != "" && c != nil && c.Reason == agents.ReasonDependenciesNotReady
}

// changed reports the fields of a struct that differ, with exceptions.
func changed[T any](now, was *T, at *field.Path, msg string, but ...string) (errs field.ErrorList) {
	to, from := reflect.ValueOf(now).Elem(), reflect.ValueOf(was).Elem()
	for i := range to.NumField() {
		name, _, _ := strings.Cut(to.Type().Field(i).Tag.Get("json"), ",")
		if !slices.Contains(but, name) && !apiequality.Semantic.DeepEqual(to.Field(i).Interface(), from.Field(i).Interface()) {
			errs = append(errs, field.Forbidden(at.Child(name), msg))
		}
	}
	return errs
}

// CheckFits rejects a Pod specification that requires more than the machine has. As for a scheduler,
// that is a request, or a limit without a request: with a smaller request, a limit is only a bound.
// was is the specification before a change, nil if it is new: fields that require no more than before
// pass, so that others can be changed on a machine that has become smaller.
func CheckFits(spec, was *corev1.PodSpec, machine corev1.ResourceList, at *field.Path) (errs field.ErrorList) {
	for i := range spec.Containers {
		res := &spec.Containers[i].Resources
		if was != nil && i < len(was.Containers) && apiequality.Semantic.DeepEqual(*res, was.Containers[i].Resources) {
			continue
		}
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			list, kind := res.Requests, "requests"
			if _, set := list[name]; !set {
				list, kind = res.Limits, "limits"
			}
			has, q := machine[name], list[name]
			if q.Cmp(has) > 0 {
				where := at.Child("containers").Index(i).Child("resources", kind).Key(string(name))
				errs = append(errs, field.Invalid(where, q.String(), "is more than this machine has, "+has.String()+", so it could never run; request less"))
			}
		}
	}
	return errs
}
