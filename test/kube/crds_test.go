package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1" //nolint:depguard // the types alone
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// maxCRD bounds a CRD well below what etcd and the annotations of kubectl take, 1 MiB and 256 KiB.
const maxCRD = 250_000

// establishTime bounds the wait for a CRD to be served; it is no measure of speed.
const establishTime = 3 * time.Minute

func newScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, apiextensions.AddToScheme, agents.AddToScheme, extensions.AddToScheme, barchan.AddToScheme,
	} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func newClient(t *testing.T, cfg *rest.Config) client.WithWatch {
	t.Helper()
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: newScheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// readCRDs returns what users install.
func readCRDs(t *testing.T) (all []*apiextensions.CustomResourceDefinition) {
	t.Helper()
	files, err := filepath.Glob("../../api/crds/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs: %v", err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if len(text) > maxCRD {
			t.Errorf("%s has %d bytes, want at most %d", f, len(text), maxCRD)
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.UnmarshalStrict(text, &crd); err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		all = append(all, &crd)
	}
	return all
}

// install installs our CRDs and returns once all of them are served.
func install(t *testing.T, cfg *rest.Config) {
	t.Helper()
	c := newClient(t, cfg)
	for _, crd := range readCRDs(t) {
		if err := c.Create(t.Context(), crd); err != nil {
			t.Fatalf("install %s: %v", crd.Name, err)
		}
		if err := awaitEstablished(t.Context(), c, crd.Name); err != nil {
			t.Fatalf("%s: %v", crd.Name, err)
		}
	}
}

func awaitEstablished(ctx context.Context, c client.WithWatch, name string) error {
	ctx, cancel := context.WithTimeout(ctx, establishTime)
	defer cancel()
	w, err := c.Watch(ctx, &apiextensions.CustomResourceDefinitionList{}, client.MatchingFields{"metadata.name": name})
	if err != nil {
		return err
	}
	defer w.Stop()
	var last []apiextensions.CustomResourceDefinitionCondition
	for e := range w.ResultChan() {
		crd, ok := e.Object.(*apiextensions.CustomResourceDefinition)
		if !ok || e.Type == watch.Deleted {
			return fmt.Errorf("watch: %s %v", e.Type, e.Object)
		}
		last = crd.Status.Conditions
		if holds(last, apiextensions.NonStructuralSchema) {
			break
		}
		if holds(last, apiextensions.Established) && holds(last, apiextensions.NamesAccepted) {
			return nil
		}
	}
	return fmt.Errorf("not established: %+v", last)
}

func holds(all []apiextensions.CustomResourceDefinitionCondition, kind apiextensions.CustomResourceDefinitionConditionType) bool {
	return slices.ContainsFunc(all, func(c apiextensions.CustomResourceDefinitionCondition) bool {
		return c.Type == kind && c.Status == apiextensions.ConditionTrue
	})
}

// TestCRDs: a real API server takes our CRDs, and serves each kind at once.
func TestCRDs(t *testing.T) {
	c := newClient(t, startKube(t))
	for _, list := range []client.ObjectList{
		&agents.SandboxList{}, &extensions.SandboxTemplateList{}, &extensions.SandboxWarmPoolList{}, &extensions.SandboxClaimList{},
		&barchan.CheckpointList{}, &barchan.APIKeyList{}, &barchan.TemplateRevisionList{}, &barchan.TemplateBuildList{},
	} {
		if err := c.List(t.Context(), list, client.InNamespace(metav1.NamespaceDefault)); err != nil {
			t.Errorf("list %T: %v", list, err)
		}
	}
}
