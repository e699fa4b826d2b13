package apiserver_test

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// withKeys has two tenants, one with a key that expires.
func withKeys(c *apiserver.Config) {
	c.Keys = func(_ context.Context, secret string) (apiserver.Tenant, error) {
		switch secret {
		case "e2b_short":
			return apiserver.Tenant{Namespace: "acme", Key: "short"}, nil
		case "e2b_endless":
			return apiserver.Tenant{Namespace: "acme", Key: "endless"}, nil
		}
		return apiserver.Tenant{}, errs.ErrUnauthenticated
	}
}

// as is kubectl with an API key in place of the admin's token.
func (k kubectl) as(t *testing.T, key string) kubectl {
	t.Helper()
	cfg, err := clientcmd.LoadFromFile(k.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range cfg.AuthInfos {
		u.Token = key
	}
	for _, c := range cfg.Contexts {
		c.Namespace = "acme"
	}
	k.kubeconfig = t.TempDir() + "/kubeconfig"
	if err := clientcmd.WriteToFile(*cfg, k.kubeconfig); err != nil {
		t.Fatal(err)
	}
	return k
}

func TestTenantsKeys(t *testing.T) {
	h := &hostPods{t: t, more: make(chan struct{}), ended: make(chan struct{})}
	s := start(t, withKeys, func(c *apiserver.Config) { c.Pods = h })
	admin := newKubectl(t, s)
	ends := metav1.NewTime(time.Now().Add(time.Hour).Truncate(time.Second))
	c := clientAs(t, s, apiserver.UserAdmin)
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "acme"}}); err != nil {
		t.Fatal(err)
	}
	for name, expires := range map[string]*metav1.Time{"short": &ends, "endless": nil} {
		k := &barchan.APIKey{ObjectMeta: metav1.ObjectMeta{Namespace: "acme", Name: name}, Spec: barchan.NewAPIKeySpec("e2b_0123456789_"+name, name)}
		k.Spec.ExpiresAt = expires
		if err := c.Create(t.Context(), k); err != nil {
			t.Fatal(err)
		}
	}
	short, endless := admin.as(t, "e2b_short"), admin.as(t, "e2b_endless")

	t.Run("its namespace", func(t *testing.T) {
		short := short
		short.t = t
		short.ok(webSandbox, "apply", "-f", "-")
		short.ok("", "get", "sandboxes,sandboxclaims,sandboxtemplates,sandboxwarmpools,checkpoints,apikeys,pods,events")
		short.ok("", "label", "sandbox", "web", "a=b")
		short.ok("", "api-resources")
		short.ok("", "explain", "sandbox.spec")
		short.ok("", "get", "namespace", "acme")
		if got := short.ok("", "exec", "web", "--", "echo", "hello"); got != "hello\n" {
			t.Errorf("exec printed %q", got)
		}
		short.ok("", "logs", "web")
		short.ok("", "delete", "sandbox", "web")
	})
	t.Run("all else", func(t *testing.T) {
		short := short
		short.t = t
		admin.ok(webSandbox, "apply", "-f", "-")
		for _, args := range [][]string{
			{"get", "sandboxes", "-A"},
			{"get", "sandboxes", "-n", "default"},
			{"get", "pods", "-n", "default"},
			{"get", "namespaces"},
			{"get", "namespace", "default"},
			{"delete", "namespace", "acme"},
			{"create", "namespace", "other"},
			{"get", "secrets", "-n", "default"},
			{"get", "configmaps", "-A"},
			{"create", "secret", "generic", "theirs", "--from-literal=a=b", "-n", "default"},
			{"get", "leases"},
			{"exec", "-n", "default", "web", "--", "true"},
			{"logs", "-n", "default", "web"},
			{"port-forward", "-n", "default", "web", ":80"},
			{"get", "sandboxes", "--as=barchan:admin"},
			{"get", "sandboxes", "-n", "default", "--as=x", "--as-user-extra=barchan.dev/namespace=default"},
			{"get", "--raw", "/metrics"},
		} {
			short.fails("", []string{"orbidden"}, args...)
		}
		short.ok(webSandbox, "apply", "-f", "-")
		short.fails("", []string{"forbidden"}, "patch", "sandbox", "web", "--subresource=status", "--type=merge", "-p", `{"status":{"podIPs":["127.0.0.1"]}}`)
		short.fails("apiVersion: extensions.agents.x-k8s.io/v1beta1\nkind: SandboxWarmPool\nmetadata: {name: p}\nspec: {replicas: 9, sandboxTemplateRef: {name: x}}\n",
			[]string{"forbidden"}, "create", "-f", "-")
	})
	t.Run("an unknown key", func(t *testing.T) {
		stranger := admin.as(t, "e2b_stranger")
		stranger.t = t
		stranger.fails("", []string{"Unauthorized"}, "get", "sandboxes")
	})
	t.Run("keys made with it", func(t *testing.T) { testKeysOfKeys(t, short, endless, ends.Time) })
	var mine barchan.APIKey
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "acme", Name: "endless"}, &mine); err != nil || mine.Spec.ExpiresAt != nil {
		t.Errorf("the key that never expires: %v, %v", mine.Spec.ExpiresAt, err)
	}
}

func testKeysOfKeys(t *testing.T, short, endless kubectl, ends time.Time) {
	short.t, endless.t = t, t
	key := func(name string, at time.Time) string {
		text := "apiVersion: barchan.dev/v1alpha1\nkind: APIKey\nmetadata: {name: " + name + "}\nspec: {sha256: " + barchan.HashKey(name) + ", prefix: e2b_abcd, description: x"
		if !at.IsZero() {
			text += ", expiresAt: " + at.UTC().Format(time.RFC3339)
		}
		return text + "}\n"
	}
	const later = "not later than"
	short.fails(key("never", time.Time{}), []string{"spec.expiresAt", later}, "create", "-f", "-")
	short.fails(key("later", ends.Add(time.Second)), []string{"spec.expiresAt", later}, "create", "-f", "-")
	short.fails(key("applied", time.Time{}), []string{"spec.expiresAt", later}, "apply", "--server-side", "-f", "-")
	short.ok(key("sooner", ends), "create", "-f", "-")
	short.fails("", []string{"spec.expiresAt", later}, "patch", "apikey", "sooner", "--type=merge", "-p", `{"spec":{"expiresAt":null}}`)
	short.fails("", []string{"spec.expiresAt", later}, "patch", "apikey", "short", "--type=merge", "-p", `{"spec":{"expiresAt":null}}`)
	short.fails("", []string{"spec.expiresAt", later}, "patch", "apikey", "endless", "--type=merge", "-p", `{"spec":{"sha256":"`+barchan.HashKey("mine")+`"}}`)
	endless.ok(key("never", time.Time{}), "create", "-f", "-")
}
