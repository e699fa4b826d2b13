package apiserver_test

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	basepool "github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

func TestNodeMayChangeLittle(t *testing.T) {
	s := start(t)
	admin, node := clientAs(t, s, apiserver.UserAdmin), clientAs(t, s, apiserver.UserNode)
	create(t, admin, sandbox("a"))
	var sb agents.Sandbox
	read := func() {
		t.Helper()
		if err := node.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "a"}, &sb); err != nil {
			t.Fatal(err)
		}
	}
	read()
	controllerutil.AddFinalizer(&sb, agents.NodeFinalizer)
	basepool.BindEnv(&sb, true)
	sb.Spec.OperatingMode, sb.Spec.ShutdownTime = agents.ModeSuspended, nil // as at its end
	if err := node.Update(t.Context(), &sb); err != nil {
		t.Errorf("update what is a node's: %v", err)
	}
	sb.Status.NodeName = "here"
	if err := node.Status().Update(t.Context(), &sb); err != nil {
		t.Errorf("write status: %v", err)
	}
	finalizers := []byte(`{"metadata":{"finalizers":[]}}`)
	if err := node.Patch(t.Context(), &sb, client.RawPatch(types.MergePatchType, finalizers)); err != nil {
		t.Errorf("remove a finalizer: %v", err)
	}
	for name, patch := range map[string]string{
		"spec":        `{"spec":{"shutdownPolicy":"Delete"}}`,
		"labels":      `{"metadata":{"labels":{"x":"y"}}}`,
		"annotations": `{"metadata":{"annotations":{"x":"y"}}}`,
		"owners":      `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"c","uid":"u"}]}}`,
	} {
		err := node.Patch(t.Context(), sb.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "it reports by the status subresource") {
			t.Errorf("patch of %s = %v, want forbidden in clear words", name, err)
		}
	}
	for name, err := range map[string]error{
		"create a sandbox": node.Create(t.Context(), sandbox("b")),
		"apply a sandbox":  node.Patch(t.Context(), applyOf("c"), client.Apply, client.FieldOwner("node")), //nolint:staticcheck // the wire form is what counts
		"create secrets":   node.Create(t.Context(), &corev1.Secret{ObjectMeta: in("mine")}),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s = %v, want forbidden", name, err)
		}
	}
	read()
	if sb.Spec.OperatingMode != agents.ModeSuspended || sb.Status.NodeName != "here" || len(sb.Finalizers) > 0 || !basepool.OwnEnv(&sb) {
		t.Errorf("afterwards: mode %s, node %q, finalizers %v, annotations %v", sb.Spec.OperatingMode, sb.Status.NodeName, sb.Finalizers, sb.Annotations)
	}
	if err := node.Delete(t.Context(), &sb); err != nil {
		t.Errorf("delete a sandbox whose time is over: %v", err)
	}
}

func applyOf(name string) *agents.Sandbox {
	sb := sandbox(name)
	sb.SetGroupVersionKind(agents.GroupVersion.WithKind("Sandbox"))
	return sb
}

func TestNetworkCredentials(t *testing.T) {
	dir := t.TempDir()
	s := start(t, func(c *apiserver.Config) { c.DataDir, c.Node = dir, true })
	token := func(user string) string {
		text, err := os.ReadFile(filepath.Join(dir, "pki", user+".token"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	admin, node := token("admin"), token("node")
	for _, tc := range []struct {
		path, token string
		want        int
	}{
		{"/healthz", "", http.StatusOK},
		{"/livez", "", http.StatusOK},
		{"/readyz", "", http.StatusOK},
		{"/version", "", http.StatusOK},
		{"/api", "", http.StatusForbidden},
		{"/apis", "", http.StatusForbidden},
		{"/metrics", "", http.StatusForbidden},
		{"/api/v1/namespaces/default/secrets", "", http.StatusForbidden},
		{"/healthz", "wrong-token-of-no-user", http.StatusUnauthorized},
		{"/api/v1/namespaces/default/secrets", "wrong-token-of-no-user", http.StatusUnauthorized},
		{"/api/v1/namespaces/default/secrets", admin, http.StatusOK},
		{"/nothing", admin, http.StatusNotFound},
		{"/apis/agents.x-k8s.io/v1beta1/sandboxes", node, http.StatusOK},
		{"/api/v1/namespaces/default/secrets", node, http.StatusOK},
		{"/apis/barchan.dev/v1alpha1/volumes", node, http.StatusOK},
		{"/api/v1/namespaces", node, http.StatusOK},
		{"/apis/barchan.dev/v1alpha1/apikeys", node, http.StatusForbidden},
	} {
		if got := get(t, s, tc.path, tc.token); got != tc.want {
			t.Errorf("GET %s with token %.5q = %d, want %d", tc.path, tc.token, got, tc.want)
		}
	}
}

// TestImpersonation: only the admin may try the rights of other users.
func TestImpersonation(t *testing.T) {
	s := start(t)
	k := newKubectl(t, s)
	k.ok("", "get", "sandboxes", "--as", apiserver.UserNode)
	k.fails("", []string{"Forbidden", apiserver.UserNode + " has no rule for it"}, "get", "apikeys", "--as", apiserver.UserNode)
}
