package kubeobjects

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// TestErrorNamesFields: a refused object's error has the fields and the rules, and no regular expression.
func TestErrorNamesFields(t *testing.T) {
	at := field.NewPath("metadata", "name")
	err := Error(apierrors.NewInvalid(schema.GroupKind{Group: "barchan.dev", Kind: "APIKey"}, "a b", field.ErrorList{
		field.Invalid(at, "a b", validation.IsDNS1123Subdomain("a b")[0]), field.Required(field.NewPath("spec"), "is missing"),
	}))
	text, _ := errs.PublicMessage(err)
	want := `metadata.name: Invalid value: "a b": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', ` +
		`and must start and end with an alphanumeric character; spec: Required value: is missing`
	if text != want || !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("%q, want %q", text, want)
	}
	if text, _ := errs.PublicMessage(Error(apierrors.NewBadRequest("no JSON"))); text != "no JSON" {
		t.Errorf("%q", text)
	}
}
