package cache_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

func template(name, image string) *extensions.SandboxTemplate {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: image}}
	return t
}

// Promise 2 depends on it: a read that begins after the response to a write returns that write.
func TestCurrentTemplateIsNeverOlderThanTheCall(t *testing.T) {
	c, _ := start(t)
	made := template("t", "v0")
	key := client.ObjectKeyFromObject(made)
	if _, _, err := c.CurrentTemplate(t.Context(), key); !errors.Is(err, errs.ErrNotFound) {
		t.Fatalf("CurrentTemplate of none = %v", err)
	}
	if err := c.Live().Create(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	for range 4 { // keep a read in flight all the time
		others.Go(func() {
			for ctx.Err() == nil {
				got, _, err := c.CurrentTemplate(ctx, key)
				if err != nil {
					if ctx.Err() == nil {
						t.Error(err)
					}
					return
				}
				got.Spec.PodTemplate.Spec.Containers[0].Image = "mine"
			}
		})
	}
	for i := range 50 {
		image := "v" + strconv.Itoa(i+1)
		made.Spec.PodTemplate.Spec.Containers[0].Image = image
		if err := c.Live().Update(t.Context(), made); err != nil {
			t.Fatal(err)
		}
		got, revision, err := c.CurrentTemplate(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if got.Spec.PodTemplate.Spec.Containers[0].Image != image {
			t.Fatalf("after the write of %s: %s", image, got.Spec.PodTemplate.Spec.Containers[0].Image)
		}
		if want, _, _ := pool.Revision(got); revision != want {
			t.Fatalf("revision = %s, want %s", revision, want)
		}
	}
	cancel()
	others.Wait()
	if err := c.Live().Delete(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.CurrentTemplate(t.Context(), key); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("CurrentTemplate of what is gone = %v", err)
	}
}

func TestNamespace(t *testing.T) {
	c, _ := start(t)
	if ns, err := c.Namespace(t.Context(), "default"); err != nil || ns.Name != "default" {
		t.Errorf("Namespace = %v, %v", ns, err)
	}
	if _, err := c.Namespace(t.Context(), "none"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("Namespace of none = %v", err)
	}
}
