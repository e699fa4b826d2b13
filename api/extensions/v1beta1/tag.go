package v1beta1

import (
	"crypto/sha256"
	"encoding/hex"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// TagOf says which tag of which template an object is.
type TagOf struct {
	// TemplateName is the template's name, which is also the name of the object of its tag default.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	TemplateName string `json:"templateName"`
	// Tag is any but default.
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-_.a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:validation:XValidation:rule="self != 'default'",message="is the object with the template's own name"
	Tag string `json:"tag"`
}

// TagObject returns the name of the object of a template's tag.
func TagObject(template, tag string) string {
	if tag == agents.DefaultTag {
		return template
	}
	name := template + "." + tag
	if len(validation.IsDNS1123Subdomain(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(tag))
	return template + ".tag-" + hex.EncodeToString(sum[:8])
}

// NameAndTag returns the name of the template that an object is a tag of, and the tag.
func (t *SandboxTemplate) NameAndTag() (name, tag string) {
	if b := t.Spec.Barchan; b != nil && b.TagOf != nil {
		return b.TagOf.TemplateName, b.TagOf.Tag
	}
	return t.Name, agents.DefaultTag
}

// ValidateTemplateChange checks a template after defaulting. old is nil on create.
func ValidateTemplateChange(t, old *SandboxTemplate) field.ErrorList {
	errs := ValidateTemplate(t)
	if old == nil {
		return errs
	}
	name, tag := t.NameAndTag()
	if wasName, wasTag := old.NameAndTag(); name != wasName || tag != wasTag {
		errs = append(errs, field.Forbidden(field.NewPath("spec", "barchan", "tagOf"), "is immutable"))
	}
	return errs
}

func validateTagOf(t *SandboxTemplate, at *field.Path) field.ErrorList {
	of := t.Spec.Barchan.TagOf
	if of == nil {
		return nil
	}
	if of.Tag == agents.DefaultTag {
		return field.ErrorList{field.Invalid(at.Child("tag"), of.Tag, "is the object with the template's own name")}
	}
	errs := agents.ValidateTag(of.Tag, at.Child("tag"))
	if len(validation.IsDNS1123Subdomain(of.TemplateName)) > 0 {
		errs = append(errs, field.Invalid(at.Child("templateName"), of.TemplateName, "must be the name of a template"))
	}
	if want := TagObject(of.TemplateName, of.Tag); len(errs) == 0 && t.Name != want && t.Name != "" {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), t.Name, "must be "+want+", the name of the object of that tag"))
	}
	return errs
}
