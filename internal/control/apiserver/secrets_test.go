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

// TestTenantsSecrets: a key writes and reads those of its namespace.
func TestTenantsSecrets(t *testing.T) {
	s := start(t, withKeys)
	c := clientAs(t, s, apiserver.UserAdmin)
	create(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "acme"}})
	k := newKubectl(t, s).as(t, "e2b_endless")

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
}

// TestRotation replaces the key while Secrets are written, and needs the old one no longer. A rotation that a crash ended after
// either write of the file is finished at the next start.
func TestRotation(t *testing.T) {
	dir := t.TempDir()
	on := func(c *apiserver.Config) { c.DataDir = dir }
	keyFile := filepath.Join(dir, "secrets.key")
	readKey := func() []byte {
		t.Helper()
		key, err := os.ReadFile(keyFile)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	s := start(t, on)
	c := clientAs(t, s, apiserver.UserAdmin)
	for i := range 150 { // more than a page
		create(t, c, &corev1.Secret{ObjectMeta: in(fmt.Sprintf("s%03d", i)), StringData: map[string]string{"k": fmt.Sprint("value-", i)}})
	}
	old := readKey()
	stopWriting := writeSecrets(t, c)
	n, err := s.RotateSecretsKey(t.Context())
	during := stopWriting()
	if err != nil || n < 150 {
		t.Fatalf("rotated %d Secrets, %v", n, err)
	}
	key := readKey()
	if len(key) != 32 || bytes.Equal(key, old) {
		t.Fatalf("the file has %d bytes, the same as before: %v", len(key), bytes.Equal(key, old))
	}
	check := func(s *apiserver.Server) { t.Helper(); checkSecrets(t, s, 150+during) }
	check(s)
	s.Stop()
	s = start(t, on)
	check(s) // with the new key alone
	s.Stop()

	// As if killed after the new key was added: none, and all, of the Secrets written with it.
	newer := bytes.Repeat([]byte{7}, 32)
	for _, content := range [][]byte{append(bytes.Clone(newer), key...), append(bytes.Clone(newer), old...)} {
		if err := os.WriteFile(keyFile, content, 0o600); err != nil {
			t.Fatal(err)
		}
		s = start(t, on)
		check(s)
		if got := readKey(); !bytes.Equal(got, newer) {
			t.Errorf("after the start the file has %d bytes, not the new key", len(got))
		}
		s.Stop()
	}
	s = start(t, on)
	check(s)
	s.Stop()
	if err := os.WriteFile(keyFile, key, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := newServer(t, on).Start(t.Context()); err == nil || !strings.Contains(err.Error(), "restore it from a backup") {
		t.Errorf("start with the old key: %v", err)
	}
}

// writeSecrets writes Secrets, one after the other, until stop is called, which returns how many.
func writeSecrets(t *testing.T, c client.Client) (stop func() int) {
	end, wrote := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { wrote <- n }()
		for ; ; n++ {
			select {
			case <-end:
				return
			default:
			}
			if err := c.Create(t.Context(), &corev1.Secret{ObjectMeta: in(fmt.Sprintf("w%05d", n)), StringData: map[string]string{"k": "written"}}); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	return func() int { close(end); return <-wrote }
}

func checkSecrets(t *testing.T, s *apiserver.Server, want int) {
	t.Helper()
	var list corev1.SecretList
	if err := clientAs(t, s, apiserver.UserAdmin).List(t.Context(), &list, client.InNamespace("default")); err != nil || len(list.Items) != want {
		t.Fatalf("%d Secrets, %v, want %d", len(list.Items), err, want)
	}
	for _, o := range list.Items {
		if string(o.Data["k"]) != "written" && !strings.HasPrefix(string(o.Data["k"]), "value-") {
			t.Errorf("Secret %s is %q", o.Name, o.Data["k"])
		}
	}
}
