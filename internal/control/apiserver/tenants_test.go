package apiserver_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// withKeys has two tenants, one with a key that expires.
func withKeys(c *apiserver.Config) {
	c.Keys = func(_ context.Context, secret string) (tenancy.Tenant, error) {
		switch secret {
		case "e2b_short":
			return tenancy.Tenant{Namespace: "acme", Key: "short"}, nil
		case "e2b_endless":
			return tenancy.Tenant{Namespace: "acme", Key: "endless"}, nil
		case "e2b_use", "e2b_manage":
			return tenancy.Tenant{Namespace: "acme", Key: "endless", Scope: barchan.KeyScope(strings.TrimPrefix(secret, "e2b_"))}, nil
		}
		return tenancy.Tenant{}, errs.ErrUnauthenticated
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
	log := auditlog.Config{Path: filepath.Join(t.TempDir(), "audit.log"), Log: telemetry.Discard()}
	audit, err := auditlog.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	recording, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	recorded := make(chan error, 1)
	go func() { recorded <- audit.Run(recording) }()
	t.Cleanup(func() { cancel(); <-recorded }) //nolint:errcheck // it returns none
	s := start(t, withKeys, func(c *apiserver.Config) { c.Pods, c.Audit = h, audit })
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
	t.Run("scopes", func(t *testing.T) { testScopes(t, admin.as(t, "e2b_use"), admin.as(t, "e2b_manage")) })
	t.Run("an unknown key", func(t *testing.T) {
		stranger := admin.as(t, "e2b_stranger")
		stranger.t = t
		stranger.fails("", []string{"Unauthorized"}, "get", "sandboxes")
	})
	t.Run("keys made with it", func(t *testing.T) { testKeysOfKeys(t, short, endless, ends.Time) })
	t.Run("audit log", func(t *testing.T) { testAuditLog(t, log.Path) })
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

// testAuditLog expects what the other tests did: the writes and streams of tenants and of the admin, with the refused ones, and no reads.
func testAuditLog(t *testing.T, path string) {
	want := []string{
		"key short exec pods acme/web ok", "key endless delete apikeys acme/endless refused",
		"user barchan:admin create sandboxes default/web ok", "key endless create volumes acme/v ok",
	}
	eventually.NoError(t, "all is recorded", func() error {
		var all []string
		err := auditlog.Read(t.Context(), path, auditlog.Filter{}, false, func(e auditlog.Entry) error {
			if verb, _, _ := strings.Cut(e.Action, " "); slices.Contains([]string{"get", "list", "watch"}, verb) {
				t.Errorf("a read is recorded: %+v", e)
			}
			if strings.Contains(e.Request, "?") || e.Address != "127.0.0.1" && e.Address != "::1" {
				t.Errorf("entry is %+v", e)
			}
			line := fmt.Sprintf("%s %s %s %s/%s %s", e.By, e.Name, e.Action, e.Namespace, e.Object, e.Result)
			all = append(all, line)
			return nil
		})
		for _, line := range want {
			if err == nil && !slices.Contains(all, line) {
				err = fmt.Errorf("no entry %q in\n%s", line, strings.Join(all, "\n"))
			}
		}
		return err
	})
}

func testScopes(t *testing.T, user, manager kubectl) {
	user.t, manager.t = t, t
	const volume = "apiVersion: barchan.dev/v1alpha1\nkind: Volume\nmetadata: {name: v}\n"
	user.ok(webSandbox, "apply", "-f", "-")
	user.ok("", "get", "sandboxes,sandboxclaims,sandboxtemplates,sandboxwarmpools,checkpoints,volumes,pods,events")
	user.fails("", []string{"forbidden", "scope use"}, "get", "apikeys")
	user.fails("", []string{"forbidden", "scope use"}, "get", "secrets")
	user.fails(volume, []string{"forbidden", "scope use"}, "create", "-f", "-")
	manager.ok(volume, "create", "-f", "-")
	manager.ok("", "get", "apikeys,secrets,configmaps")
	manager.fails("", []string{"forbidden", "scope manage"}, "delete", "apikey", "endless")
	manager.fails("", []string{"forbidden", "scope manage"}, "patch", "apikey", "endless", "--type=merge", "-p", `{"spec":{"sha256":"`+barchan.HashKey("mine")+`"}}`)
	manager.ok("", "delete", "volume", "v", "--wait=false")
}
