package claim

import (
	"fmt"
	"testing"
)

// TestTemplateLabels has a tenant name many templates: the labels of a metric have an end.
func TestTemplateLabels(t *testing.T) {
	var l templateLabels
	labels := map[string]bool{}
	for i := range 3 * maxTemplates {
		labels[l.label(fmt.Sprintf("template-%d", i))] = true
	}
	if len(labels) != maxTemplates+1 || !labels["__other__"] {
		t.Errorf("%d labels", len(labels))
	}
	if got := l.label("template-0"); got != "template-0" {
		t.Errorf("a known one is %q", got)
	}
	if got := l.label(""); got != "__unknown__" {
		t.Errorf("none is %q", got)
	}
}
