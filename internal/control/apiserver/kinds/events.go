package kinds

import (
	"errors"
	"strings"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta/table"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const eventTTLSeconds = 3600

// eventKind stores the events of both groups, v1 and events.k8s.io/v1, as v1: an event that a
// client writes through one group can be read through the other.
func eventKind() *Resource {
	return &Resource{
		GV: corev1.SchemeGroupVersion, Plural: "events", Kind: "Event", ShortNames: []string{"ev"},
		Object: &corev1.Event{}, List: &corev1.EventList{},
		Namespaced: true, TTLSeconds: eventTTLSeconds,
		Validate: checked(validateEvent),
		fields:   selectable(eventFields),
		aliases: map[string]string{
			"regarding.kind": "involvedObject.kind", "regarding.namespace": "involvedObject.namespace",
			"regarding.name": "involvedObject.name", "regarding.uid": "involvedObject.uid",
			"regarding.apiVersion": "involvedObject.apiVersion", "regarding.resourceVersion": "involvedObject.resourceVersion",
			"regarding.fieldPath": "involvedObject.fieldPath", "reportingController": "reportingComponent",
		},
		columns: []column{
			text("Last Seen", func(e *corev1.Event) string { return table.ConvertToHumanReadableDateType(lastSeen(e)) }),
			text("Type", func(e *corev1.Event) string { return e.Type }),
			text("Reason", func(e *corev1.Event) string { return e.Reason }),
			text("Object", func(e *corev1.Event) string {
				return strings.ToLower(e.InvolvedObject.Kind) + "/" + e.InvolvedObject.Name
			}),
			text("Message", func(e *corev1.Event) string { return strings.TrimSpace(e.Message) }),
		},
	}
}

func eventFields(e *corev1.Event) fields.Set {
	o := e.InvolvedObject
	return fields.Set{
		"involvedObject.kind": o.Kind, "involvedObject.namespace": o.Namespace, "involvedObject.name": o.Name,
		"involvedObject.uid": string(o.UID), "involvedObject.apiVersion": o.APIVersion,
		"involvedObject.resourceVersion": o.ResourceVersion, "involvedObject.fieldPath": o.FieldPath,
		"reason": e.Reason, "type": e.Type, "source": e.Source.Component, "reportingComponent": e.ReportingController,
	}
}

func lastSeen(e *corev1.Event) metav1.Time {
	switch {
	case e.Series != nil && !e.Series.LastObservedTime.IsZero():
		return metav1.Time{Time: e.Series.LastObservedTime.Time}
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp
	case !e.EventTime.IsZero():
		return metav1.Time{Time: e.EventTime.Time}
	default:
		return e.CreationTimestamp
	}
}

func validateEvent(e *corev1.Event) field.ErrorList {
	about := e.InvolvedObject.Namespace
	if about == "" {
		about = metav1.NamespaceDefault // events of cluster-scoped objects are in default
	}
	if about == e.Namespace {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("involvedObject", "namespace"), e.InvolvedObject.Namespace,
		"must be the event's own namespace")}
}

// addEventConversions registers the conversions between the two forms of an event.
func addEventConversions(s *runtime.Scheme) error {
	return errors.Join(
		convertible(s, eventToCore), convertible(s, eventFromCore),
		convertible(s, func(in *eventsv1.EventList, out *corev1.EventList) {
			out.ListMeta, out.Items = in.ListMeta, make([]corev1.Event, len(in.Items))
			for i := range in.Items {
				eventToCore(&in.Items[i], &out.Items[i])
			}
		}),
		convertible(s, func(in *corev1.EventList, out *eventsv1.EventList) {
			out.ListMeta, out.Items = in.ListMeta, make([]eventsv1.Event, len(in.Items))
			for i := range in.Items {
				eventFromCore(&in.Items[i], &out.Items[i])
			}
		}),
	)
}

func convertible[A, B any](s *runtime.Scheme, f func(in *A, out *B)) error {
	return s.AddConversionFunc((*A)(nil), (*B)(nil), func(a, b any, _ conversion.Scope) error {
		f(a.(*A), b.(*B))
		return nil
	})
}

func eventToCore(in *eventsv1.Event, out *corev1.Event) {
	*out = corev1.Event{
		ObjectMeta: in.ObjectMeta, InvolvedObject: in.Regarding, Reason: in.Reason, Message: in.Note,
		Source: in.DeprecatedSource, FirstTimestamp: in.DeprecatedFirstTimestamp, LastTimestamp: in.DeprecatedLastTimestamp,
		Count: in.DeprecatedCount, Type: in.Type, EventTime: in.EventTime, Action: in.Action, Related: in.Related,
		ReportingController: in.ReportingController, ReportingInstance: in.ReportingInstance,
	}
	if in.Series != nil {
		out.Series = &corev1.EventSeries{Count: in.Series.Count, LastObservedTime: in.Series.LastObservedTime}
	}
}

func eventFromCore(in *corev1.Event, out *eventsv1.Event) {
	*out = eventsv1.Event{
		ObjectMeta: in.ObjectMeta, Regarding: in.InvolvedObject, Reason: in.Reason, Note: in.Message,
		DeprecatedSource: in.Source, DeprecatedFirstTimestamp: in.FirstTimestamp, DeprecatedLastTimestamp: in.LastTimestamp,
		DeprecatedCount: in.Count, Type: in.Type, EventTime: in.EventTime, Action: in.Action, Related: in.Related,
		ReportingController: in.ReportingController, ReportingInstance: in.ReportingInstance,
	}
	if in.Series != nil {
		out.Series = &eventsv1.EventSeries{Count: in.Series.Count, LastObservedTime: in.Series.LastObservedTime}
	}
}
