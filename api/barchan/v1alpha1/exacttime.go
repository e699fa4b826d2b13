package v1alpha1

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ExactNow is the present as an annotation holds it, to the nanosecond; the fields of objects keep seconds.
func ExactNow() string { return time.Now().UTC().Format(time.RFC3339Nano) }

// ExactTime reads an annotation that holds a time, in UTC. Without a valid one it is zero.
func ExactTime(obj metav1.Object, annotation string) time.Time {
	text := obj.GetAnnotations()[annotation]
	if text == "" { // as a rule, for which the error of Parse is slow
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}
	}
	return at.UTC()
}

// CreatedAt is when an object was made: to the nanosecond if the API noted it.
func CreatedAt(obj metav1.Object) time.Time {
	if exact := ExactTime(obj, AnnotationCreatedAt); !exact.IsZero() {
		return exact
	}
	return obj.GetCreationTimestamp().UTC()
}
