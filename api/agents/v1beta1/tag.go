package v1beta1

import (
	"regexp"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// DefaultTag is the tag of a template that is named without one.
const DefaultTag = "default"

// MaxTag bounds a tag's length.
const MaxTag = 63

var tagForm = regexp.MustCompile(`^[a-z0-9]([-_.a-z0-9]*[a-z0-9])?$`)

// ValidateTag checks a template's tag.
func ValidateTag(tag string, at *field.Path) field.ErrorList {
	if len(tag) > MaxTag || !tagForm.MatchString(tag) {
		return field.ErrorList{field.Invalid(at, tag[:min(len(tag), MaxTag)], "must have from 1 to 63 lower-case letters, digits, dashes, dots and underscores, and begin and end with a letter or digit")}
	}
	if uuid.Validate(tag) == nil {
		return field.ErrorList{field.Invalid(at, tag, "must not be a UUID, which names a build")}
	}
	return nil
}
