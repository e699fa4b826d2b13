package sandbox

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

func fieldsOf(errs field.ErrorList) (all []string) {
	for _, e := range errs {
		all = append(all, e.Field)
	}
	slices.Sort(all)
	return all
}

func TestCheckChange(t *testing.T) {
	image := func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.Containers[0].Image = "y" }
	condition := func(kind, status, reason string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionStatus(status), Reason: reason}
	}
	runs := func(s *agents.Sandbox) {
		s.Status.NodeName, s.Status.PodIPs = "n1", []string{"10.9.0.2"}
		s.Status.Conditions = []metav1.Condition{condition("Ready", "True", "DependenciesReady")}
	}
	suspended := func(mode agents.SuspendMode) func(*agents.Sandbox) {
		return func(s *agents.Sandbox) {
			s.Status.NodeName, s.Status.Barchan = "n1", &agents.BarchanStatus{StartedAt: new(metav1.Now())}
			s.Status.Conditions = []metav1.Condition{condition("Suspended", "True", "PodTerminated")}
			s.Spec.OperatingMode, s.Spec.Barchan = agents.ModeSuspended, &agents.BarchanSpec{Suspend: mode}
		}
	}
	at := func(reason string) func(*agents.Sandbox) {
		return func(s *agents.Sandbox) {
			s.Status.NodeName, s.Status.Conditions = "n1", []metav1.Condition{condition("Ready", "False", reason)}
		}
	}
	const container = "spec.containers[0]."
	for name, tt := range map[string]struct {
		was, change func(*agents.Sandbox)
		want        []string
	}{
		"image":      {runs, image, []string{container + "image"}},
		"no change":  {runs, func(*agents.Sandbox) {}, nil},
		"other spec": {runs, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended }, nil},
		"metadata":   {runs, func(s *agents.Sandbox) { s.Spec.PodTemplate.ObjectMeta.Labels = map[string]string{"a": "b"} }, nil},
		"env": {runs, func(s *agents.Sandbox) {
			s.Spec.PodTemplate.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "b"}}
		}, nil},
		"command and limits": {runs, func(s *agents.Sandbox) {
			s.Spec.PodTemplate.Spec.Containers[0].Command = []string{"a"}
			s.Spec.PodTemplate.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1")}
		}, []string{container + "command", container + "resources"}},
		"of the Pod":    {runs, func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.RestartPolicy = "Always" }, []string{"spec.restartPolicy"}},
		"one more":      {runs, func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.Containers = nil }, []string{"spec.containers"}},
		"with memory":   {suspended(agents.SuspendMemory), image, []string{container + "image"}},
		"with files":    {suspended(agents.SuspendFiles), image, []string{container + "image"}},
		"with volumes":  {suspended(agents.SuspendDelete), image, nil},
		"new":           {func(*agents.Sandbox) {}, image, nil},
		"is being made": {at("DependenciesNotReady"), image, []string{container + "image"}},
		"lacks image":   {at(ReasonImage), image, nil},
		"ended": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{condition("Finished", "True", "PodFailed")}
		}, image, []string{container + "image"}},
	} {
		t.Run(name, func(t *testing.T) {
			was := &agents.Sandbox{}
			was.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "x"}}
			tt.was(was)
			now := was.DeepCopy()
			tt.change(now)
			errs := CheckChange(now, was, field.NewPath("spec"))
			if got := fieldsOf(errs); !slices.Equal(got, tt.want) {
				t.Errorf("refused %v, want %v", errs, tt.want)
			}
			if ended := len(errs) > 0 && strings.Contains(errs[0].Detail, "has ended"); ended != (name == "ended") {
				t.Errorf("got %v", errs)
			}
		})
	}
}

func TestCheckFits(t *testing.T) {
	machine := corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("4Gi")}
	list := func(cpu, memory string) corev1.ResourceList {
		all := corev1.ResourceList{}
		for name, text := range map[corev1.ResourceName]string{"cpu": cpu, "memory": memory} {
			if text != "" {
				all[name] = resource.MustParse(text)
			}
		}
		return all
	}
	for name, tt := range map[string]struct {
		requests, limits corev1.ResourceList
		want             []string
	}{
		"nothing":           {nil, nil, nil},
		"all of it":         {nil, list("2", "4Gi"), nil},
		"too many CPUs":     {nil, list("100", "1Gi"), []string{"spec.containers[0].resources.limits[cpu]"}},
		"too much memory":   {nil, list("1", "5Gi"), []string{"spec.containers[0].resources.limits[memory]"}},
		"a request of both": {list("2500m", "1Ti"), nil, []string{"spec.containers[0].resources.requests[cpu]", "spec.containers[0].resources.requests[memory]"}},
		"a high bound":      {list("1", "1Gi"), list("100", "1Ti"), nil},
		"one bound only":    {list("1", ""), list("100", "1Ti"), []string{"spec.containers[0].resources.limits[memory]"}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := runnable(func(_ *corev1.PodSpec, c *corev1.Container) {
				c.Resources = corev1.ResourceRequirements{Requests: tt.requests, Limits: tt.limits}
			})
			errs := CheckFits(spec, nil, machine, field.NewPath("spec"))
			if got := fieldsOf(errs); !slices.Equal(got, tt.want) {
				t.Errorf("refused %v, want %v", errs, tt.want)
			}
			if again := CheckFits(spec, spec.DeepCopy(), machine, field.NewPath("spec")); len(again) > 0 {
				t.Errorf("without a change, refused %v", again)
			}
			for _, e := range errs {
				if !strings.Contains(e.Detail, "this machine has, 2,") && !strings.Contains(e.Detail, "this machine has, 4Gi,") {
					t.Errorf("got %v", e)
				}
			}
		})
	}
}
