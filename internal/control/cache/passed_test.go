package cache_test

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

// TestPassed: the cache knows how far its watch has come. What is in it, it has passed.
func TestPassed(t *testing.T) {
	c, _ := start(t)
	listed, err := cache.Passed[*agents.Sandbox](t.Context(), c)
	if err != nil || listed == "" {
		t.Fatalf("after the first list: %q, %v", listed, err)
	}
	made := create(t, c)
	if _, err := c.WaitSandbox(t.Context(), client.ObjectKeyFromObject(made), there); err != nil {
		t.Fatal(err)
	}
	passed, err := cache.Passed[*agents.Sandbox](t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	for _, before := range []string{listed, made.ResourceVersion} {
		if order, err := resourceversion.CompareResourceVersion(passed, before); err != nil || order < 0 {
			t.Errorf("passed %q, but not %q: %v", passed, before, err)
		}
	}
	if _, err := cache.Passed[*corev1.Pod](t.Context(), c); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("of a kind that it does not hold: %v", err)
	}
}
