package e2e

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
)

// rotateKey replaces the key of Secrets. A crash leaves a server that starts with whatever keys the file has.
var rotateKey = operation{
	name: "rotation of the key of Secrets", storeAfter: neverOnDisk,
	prepare: func(w *fixture) *subject {
		s := newSubject("rotate")
		if out, err := w.kubectl("", "create", "secret", "generic", s.name, "--from-literal=k=swordfish"); err != nil {
			w.t.Fatalf("%v\n%s", err, out)
		}
		s.oldKey = w.secretsKey()
		return s
	},
	do: func(_ context.Context, w *fixture, _ *subject) error {
		out, err := w.try("secrets", "rotate")
		if err != nil {
			return errors.New(out)
		}
		return nil
	},
	check: func(w *fixture, s *subject) {
		if key := w.secretsKey(); len(key) != 32 || bytes.Equal(key, s.oldKey) {
			w.t.Errorf("the file has %d bytes, those of before: %v", len(key), bytes.Equal(key, s.oldKey))
		}
		if out, err := w.kubectl("", "get", "secret", s.name, "-o", "jsonpath={.data.k}"); err != nil || out != "c3dvcmRmaXNo" {
			w.t.Errorf("the Secret has %q, %v", out, err)
		}
	},
	cleanup: func(w *fixture, s *subject) {
		_, err := w.kubectl("", "delete", "secret", s.name)
		w.need(err)
	},
}

func (w *fixture) secretsKey() []byte {
	w.t.Helper()
	key, err := os.ReadFile(filepath.Join(w.dir, "d", "apiserver", "secrets.key"))
	w.need(err)
	return key
}
