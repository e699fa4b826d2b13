package kinds

import (
	"errors"
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

// Scheme holds the served types and their encodings.
type Scheme struct {
	*runtime.Scheme
	Codecs     serializer.CodecFactory
	Parameters runtime.ParameterCodec
}

// NewScheme registers every resource. The published type is the internal version too.
func NewScheme(resources []*Resource) (*Scheme, error) {
	s := runtime.NewScheme()
	unversioned := schema.GroupVersion{Version: "v1"}
	metav1.AddToGroupVersion(s, unversioned)
	s.AddUnversionedTypes(unversioned, &metav1.Status{}, &metav1.APIVersions{}, &metav1.APIGroupList{}, &metav1.APIGroup{}, &metav1.APIResourceList{})
	for _, r := range resources {
		if err := register(s, r); err != nil {
			return nil, fmt.Errorf("register %s: %w", r.Kind, err)
		}
	}
	if err := errors.Join(registerEvents(s, resources), registerScale(s)); err != nil {
		return nil, fmt.Errorf("register shared kinds: %w", err)
	}
	return &Scheme{Scheme: s, Codecs: serializer.NewCodecFactory(s), Parameters: runtime.NewParameterCodec(s)}, nil
}

func internal(gv schema.GroupVersion) schema.GroupVersion {
	return schema.GroupVersion{Group: gv.Group, Version: runtime.APIVersionInternal}
}

func register(s *runtime.Scheme, r *Resource) error {
	for _, gv := range []schema.GroupVersion{r.GV, internal(r.GV)} {
		s.AddKnownTypes(gv, r.New(), r.NewList())
	}
	metav1.AddToGroupVersion(s, r.GV)
	if r.Defaults != nil {
		s.AddTypeDefaultingFunc(r.New(), func(o any) { r.Defaults(o.(runtime.Object)) })
		s.AddTypeDefaultingFunc(r.NewList(), func(o any) {
			_ = meta.EachListItem(o.(runtime.Object), func(item runtime.Object) error {
				r.Defaults(item)
				return nil
			})
		})
	}
	return errors.Join(s.SetVersionPriority(r.GV), registerFields(s, r, r.GV))
}

// registerFields lets selectors use the fields of a kind, and refuses all others by name.
func registerFields(s *runtime.Scheme, r *Resource, gv schema.GroupVersion) error {
	_, known, err := r.Attributes(r.New())
	if err != nil {
		return err
	}
	return s.AddFieldLabelConversionFunc(gv.WithKind(r.Kind), func(label, value string) (string, string, error) {
		if alias, ok := r.aliases[label]; ok {
			label = alias
		}
		if _, ok := known[label]; !ok {
			return "", "", fmt.Errorf("%q is not a known field selector of %s", label, r.Plural)
		}
		return label, value, nil
	})
}

// registerEvents serves the events of v1 as those of events.k8s.io/v1 too.
func registerEvents(s *runtime.Scheme, resources []*Resource) error {
	gv := eventsv1.SchemeGroupVersion
	s.AddKnownTypes(gv, &eventsv1.Event{}, &eventsv1.EventList{})
	s.AddKnownTypes(internal(gv), &corev1.Event{}, &corev1.EventList{})
	metav1.AddToGroupVersion(s, gv)
	failures := []error{s.SetVersionPriority(gv), addEventConversions(s)}
	for _, r := range resources {
		if r.Plural == "events" {
			failures = append(failures, registerFields(s, r, gv))
		}
	}
	return errors.Join(failures...)
}

// registerScale adds the kind of the scale subresource, which has no resource of its own.
func registerScale(s *runtime.Scheme) error {
	gv := autoscalingv1.SchemeGroupVersion
	s.AddKnownTypes(gv, &autoscalingv1.Scale{})
	s.AddKnownTypes(internal(gv), &autoscalingv1.Scale{})
	metav1.AddToGroupVersion(s, gv)
	return s.SetVersionPriority(gv)
}
