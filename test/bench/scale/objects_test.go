package scale

import (
	"slices"
	"testing"
)

func TestSizes(t *testing.T) {
	if got, err := Sizes("100,1000"); err != nil || !slices.Equal(got, []int{100, 1000}) {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"", "0", "x", "100,100", "1000,100", "100,"} {
		if got, err := Sizes(bad); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
	if _, err := Sizes(Usual); err != nil {
		t.Error(err)
	}
}
