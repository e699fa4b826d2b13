package ctrd

import (
	"errors"
	"maps"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestLabelRecord(t *testing.T) {
	c := started(t)
	must(t, c.CreateContainer(t.Context(), Container{ID: "k", Image: "i", Runtime: "gvisor", Labels: map[string]string{"x.test/a": "1", "x.test/b": "2"}}))
	for _, tt := range []struct {
		value string
		want  map[string]string
	}{
		{"3", map[string]string{"x.test/a": "3", "x.test/b": "2"}},
		{"", map[string]string{"x.test/b": "2"}},
		{"", map[string]string{"x.test/b": "2"}},
		{"4", map[string]string{"x.test/a": "4", "x.test/b": "2"}},
	} {
		must(t, c.LabelRecord(t.Context(), "k", "x.test/a", tt.value))
		records, err := c.Records(t.Context())
		if err != nil || len(records) != 1 || !maps.Equal(records[0].Labels, tt.want) || records[0].Image != "i" || records[0].Runtime != "gvisor" {
			t.Errorf("%+v, %v, want labels %v", records, err, tt.want)
		}
	}
	if with, err := c.RecordsWith(t.Context(), "x.test/a", "4"); err != nil || len(with) != 1 {
		t.Errorf("%+v, %v", with, err)
	}
	if err := c.LabelRecord(t.Context(), "none", "x.test/a", "1"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("no record: %v", err)
	}
	must(t, c.RemoveContainer(t.Context(), "k"))
}
