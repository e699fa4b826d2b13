package v1alpha1_test

import (
	"fmt"
	"strings"
	"testing"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

const (
	ecdsaKey = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBN9Z1r2iQnfvvODK3VHR2Q3UxShl+LcNouR8oD5RLLwVCx1e7LuPTaWiUK8nTM1azwYGbjzlr3/kuQTglwhbq5g= root@vm"
	// ecdsaPrint is what ssh-keygen prints of it.
	ecdsaPrint = "SHA256:Lzt+E2gcABBpWekNFTzG2ZL4H+FYliEjZ18h+VsNKrY"
	shortRSA   = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQCnS+w2PrA1KSXe+czvMfPJ8DhcuX17mllLP+2Pz4hN/fz1PbIypYD4Ve7eWD1WOJrlDz0Z/jr+JZLefUsbH13vKFMTxu+vwwh5GOxv9LHCLQpxGCB9Pnp0EcwtO1QZSzDH9kBgNWplcArcl/w1Umz00jPsZwzAe9+1MfEcJ7/+tw=="
)

func TestSSHFingerprint(t *testing.T) {
	if got, err := barchan.SSHFingerprint(ecdsaKey); err != nil || got != ecdsaPrint {
		t.Errorf("got %s, %v, want %s", got, err, ecdsaPrint)
	}
	if got := barchan.SSHComment(ecdsaKey); got != "root@vm" {
		t.Errorf("comment %q", got)
	}
	for name, text := range map[string]string{
		"empty": "", "type alone": "ssh-ed25519", "short RSA": shortRSA, "two lines": ecdsaKey + "\n" + ecdsaKey, "options": "restrict " + ecdsaKey,
		"another type":  strings.Replace(ecdsaKey, "nistp256", "nistp384", 1),
		"no base64":     "ssh-ed25519 ????",
		"certificate":   "ssh-ed25519-cert-v01@openssh.com AAAA",
		"private key":   "-----BEGIN OPENSSH PRIVATE KEY-----",
		"long":          ecdsaKey + strings.Repeat("x", 4096),
		"cut to a type": "ssh-ed25519 AAAA",
	} {
		if got, err := barchan.SSHFingerprint(text); err == nil {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func FuzzSSHFingerprint(f *testing.F) {
	f.Add(ecdsaKey)
	f.Fuzz(func(t *testing.T, text string) {
		got, err := barchan.SSHFingerprint(text)
		if (err == nil) != strings.HasPrefix(got, "SHA256:") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	})
}

// TestAPIKeyWithSSHKeys names the field, and never repeats what may be a private key.
func TestAPIKeyWithSSHKeys(t *testing.T) {
	k := &barchan.APIKey{Spec: barchan.NewAPIKeySpec(barchan.NewKeySecret(), "")}
	k.Spec.SSHKeys = []string{ecdsaKey}
	if errs := barchan.ValidateAPIKey(k); len(errs) > 0 {
		t.Errorf("a valid key: %v", errs)
	}
	k.Spec.SSHKeys = []string{ecdsaKey, "secret-text", ecdsaKey + " again"}
	text := fmt.Sprint(barchan.ValidateAPIKey(k))
	for _, want := range []string{"spec.sshKeys[1]: Invalid", "spec.sshKeys[2]: Duplicate"} {
		if !strings.Contains(text, want) || strings.Contains(text, "secret-text") {
			t.Errorf("%s, want %q", text, want)
		}
	}
	k.Spec.SSHKeys = make([]string, barchan.MaxSSHKeys+1)
	if text := fmt.Sprint(barchan.ValidateAPIKey(k)); !strings.Contains(text, "spec.sshKeys: Too many") {
		t.Errorf("too many: %s", text)
	}
}
