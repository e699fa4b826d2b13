package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

var (
	// buildPrivate builds from an image that only the build's credentials can pull.
	buildPrivate = operation{
		name: "build from a private image", storeAfter: neverOnDisk, prepare: privateSubject, do: buildPrivateSubject,
		check: func(w *fixture, s *subject) {
			w.need(w.objects.Get(w.t.Context(), client.ObjectKey{Namespace: "default", Name: s.name}, &extensions.SandboxTemplate{}))
		},
		cleanup: cleanPrivate,
	}
	// removeImage removes a pulled image.
	removeImage = operation{
		name: "image removal", storeAfter: neverOnDisk,
		prepare: func(w *fixture) *subject {
			s := privateSubject(w)
			if out, err := w.tryIn(registryPassword, "image", "pull", s.nonce, "--username", registryUser, "--password-stdin"); err != nil {
				w.t.Fatalf("pull: %v\n%s", err, out)
			}
			return s
		},
		do: func(_ context.Context, w *fixture, s *subject) error {
			if out, err := w.try("image", "rm", s.nonce); err != nil && !strings.Contains(out, "not found") {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		},
		check: func(w *fixture, s *subject) {
			if _, ok := w.image(s.nonce); ok {
				w.t.Errorf("image %s is still there", s.nonce)
			}
		},
		cleanup: func(*fixture, *subject) {},
	}
)

// privateSubject has the base image in a registry that requires a user, under the name in its nonce.
func privateSubject(w *fixture) *subject {
	w.t.Helper()
	s := newSubject("private")
	s.nonce = startRegistry(w.t) + "/private/" + s.name + ":1"
	if out, err := w.tryIn(registryPassword, "image", "push", baseImage, s.nonce, "--username", registryUser, "--password-stdin", "--plain-http"); err != nil {
		w.t.Fatalf("push: %v\n%s", err, out)
	}
	return s
}

// buildPrivateSubject requests a build, as the SDK does, and waits for its end.
func buildPrivateSubject(ctx context.Context, w *fixture, s *subject) error {
	var made struct{ TemplateID, BuildID string }
	if _, err := w.send(ctx, http.MethodPost, "/v3/templates", "", map[string]any{"name": s.name}, &made); err != nil {
		return err
	}
	body := map[string]any{
		"fromImage": s.nonce, "fromImageRegistry": map[string]any{"type": "registry", "username": registryUser, "password": registryPassword},
		"steps": []any{map[string]any{"type": "RUN", "args": []string{"true # " + s.name}}},
	}
	if _, err := w.send(ctx, http.MethodPost, "/v2/templates/"+made.TemplateID+"/builds/"+made.BuildID, "", body, nil); err != nil {
		return err
	}
	return w.awaitBuild(ctx, made.BuildID)
}

// cleanPrivate deletes what the builds made. Their credentials go with them.
func cleanPrivate(w *fixture, s *subject) {
	w.t.Helper()
	ctx := w.t.Context()
	var builds barchan.TemplateBuildList
	w.need(w.objects.List(ctx, &builds, client.InNamespace("default")))
	for i := range builds.Items {
		if builds.Items[i].Spec.TemplateName == s.name {
			w.need(client.IgnoreNotFound(w.objects.Delete(ctx, &builds.Items[i])))
		}
	}
	t := &extensions.SandboxTemplate{}
	t.Namespace, t.Name = "default", s.name
	w.need(client.IgnoreNotFound(w.objects.Delete(ctx, t)))
	w.need(w.objects.DeleteAllOf(ctx, &barchan.Checkpoint{}, client.InNamespace("default"), client.MatchingLabels{barchan.LabelPurpose: barchan.PurposeBuild}))
	w.noCheckpoint()
	w.noSecrets()
	w.must("image", "rm", "--force", s.nonce)
}

// noSecrets waits until the credentials of builds are gone.
func (w *fixture) noSecrets() {
	w.t.Helper()
	eventually.NoError(w.t, "credentials of builds are gone", func() error {
		var all corev1.SecretList
		if err := w.objects.List(w.t.Context(), &all, client.HasLabels{barchan.LabelBuild}); err != nil {
			return err
		}
		if n := len(all.Items); n > 0 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
}
