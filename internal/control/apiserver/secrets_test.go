package apiserver_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// onDisk reports whether a file of the embedded etcd has a text.
func onDisk(t *testing.T, dir, text string) (found bool) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(dir, "etcd"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		found = found || bytes.Contains(content, []byte(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestSecretsAtRest: etcd's files never have a Secret's value, and a server without the key does not start.
func TestSecretsAtRest(t *testing.T) {
	const secretValue, plainValue = "correct-horse-battery-staple", "plainly-a-config-map"
	dir := t.TempDir()
	on := func(c *apiserver.Config) { c.DataDir = dir }
	s := start(t, on)
	create(t, clientAs(t, s, apiserver.UserAdmin),
		&corev1.Secret{ObjectMeta: in("a"), StringData: map[string]string{"k": secretValue}},
		&corev1.ConfigMap{ObjectMeta: in("a"), Data: map[string]string{"k": plainValue}})
	s.Stop()
	if onDisk(t, dir, secretValue) || !onDisk(t, dir, plainValue) {
		t.Errorf("on disk: the Secret's value %v, the ConfigMap's %v", onDisk(t, dir, secretValue), onDisk(t, dir, plainValue))
	}

	key := filepath.Join(dir, "secrets.key")
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v, %v", info, err)
	}
	aside := key + ".aside"
	if err := os.Rename(key, aside); err != nil {
		t.Fatal(err)
	}
	lost := newServer(t, on)
	if err := lost.Start(t.Context()); err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), "restore it from a backup") {
		t.Errorf("start without the key: %v", err)
	}
	if err := os.Rename(aside, key); err != nil {
		t.Fatal(err)
	}
	var got corev1.Secret
	if err := clientAs(t, start(t, on), apiserver.UserAdmin).Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "a"}, &got); err != nil || string(got.Data["k"]) != secretValue {
		t.Errorf("with the key again: %q, %v", got.Data["k"], err)
	}
}

// TestTenantsSecrets: a key writes and reads those of its namespace, up to a number and a size.
func TestTenantsSecrets(t *testing.T) {
	s := start(t, withKeys)
	c := clientAs(t, s, apiserver.UserAdmin)
	create(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "acme"}})
	admin := newKubectl(t, s)
	k := admin.as(t, "e2b_endless")

	k.ok("", "create", "secret", "generic", "s", "--from-literal=a=b")
	k.ok("", "create", "configmap", "c", "--from-literal=a=b")
	if out := k.ok("", "describe", "secret", "s"); !strings.Contains(out, "a:  1 bytes") || strings.Contains(out, "Yg==") {
		t.Errorf("describe shows %s", out)
	}
	k.ok("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: c}\n", "apply", "-f", "-")
	if got := k.ok("", "get", "configmap", "c", "-o", "jsonpath={.data.a}"); got != "c" {
		t.Errorf("the ConfigMap has %q", got)
	}
	k.ok("", "patch", "secret", "s", "--type=merge", "-p", `{"immutable":true}`)
	k.fails("", []string{"data", "is immutable"}, "patch", "secret", "s", "--type=merge", "-p", `{"stringData":{"a":"c"}}`)

	big := strings.Repeat("x", 1<<20-1)
	for i := range 63 {
		create(t, c, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "acme", Name: fmt.Sprintf("big-%d", i)}, Data: map[string]string{"a": big}})
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(big), 0o600); err != nil {
		t.Fatal(err)
	}
	k.fails("", []string{"data", "64 MiB"}, "create", "secret", "generic", "full", "--from-file=a="+file)
	k.ok("", "delete", "configmap", "big-0")
	k.ok("", "create", "secret", "generic", "full", "--from-file=a="+file)
	k.ok("", "delete", "secret", "s")
	admin.ok("", "create", "secret", "generic", "more", "--from-file=a="+file, "-n", "acme")
}
