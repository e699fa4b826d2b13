package idempotency

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

func hasher(t *testing.T, secret byte) Hasher {
	t.Helper()
	tokens, err := sandbox.NewTokens(bytes.Repeat([]byte{secret}, 32))
	if err != nil {
		t.Fatal(err)
	}
	h, err := NewHasher(tokens)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func digest(t *testing.T, h Hasher, namespace, key string) Digest {
	t.Helper()
	d, err := h.Of(namespace, key, map[string]string{"env": "secret"})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A tenant that guesses another's key finds nothing with it, and cannot make the names in advance.
func TestDigestsNeedTheSecret(t *testing.T) {
	one := digest(t, hasher(t, 1), "team-a", "job-1")
	if again := digest(t, hasher(t, 1), "team-a", "job-1"); again != one || again.Name(0) != one.Name(0) {
		t.Error("the same request has two digests")
	}
	for what, other := range map[string]Digest{
		"another secret":    digest(t, hasher(t, 2), "team-a", "job-1"),
		"another namespace": digest(t, hasher(t, 1), "team-b", "job-1"),
		"another key":       digest(t, hasher(t, 1), "team-a", "job-2"),
	} {
		if other.Key == one.Key || other.Name(0) == one.Name(0) {
			t.Errorf("%s gives the same hash or name", what)
		}
		if what != "another key" && other.Body == one.Body {
			t.Errorf("%s gives the same hash of the body", what)
		}
		s := &agents.Sandbox{}
		s.Annotations = map[string]string{}
		one.Mark(s)
		if made, err := other.Made(s); made || err != nil {
			t.Errorf("%s finds the sandbox: %t, %v", what, made, err)
		}
	}
	public := sha256.Sum256([]byte("job-1"))
	if one.Key == hex.EncodeToString(public[:]) {
		t.Error("the hash of the key has no secret")
	}
	if one.Name(0) == one.Name(1) || !strings.HasPrefix(one.Name(0), "once-") {
		t.Errorf("names %s and %s", one.Name(0), one.Name(1))
	}
	// Who reads the annotations does not know the names.
	if (Digest{Key: one.Key, Body: one.Body}).Name(1) == one.Name(1) {
		t.Error("the name follows from the annotation")
	}
}
