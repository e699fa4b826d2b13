package defaults

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSecretIsMadeOnceAndNeverReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c", "secret")
	made, err := LoadSecret(path)
	if err != nil || len(made) != secretBytes {
		t.Fatalf("LoadSecret = %d bytes, %v", len(made), err)
	}
	if again, err := LoadSecret(path); err != nil || !bytes.Equal(again, made) {
		t.Errorf("the second time it differs, %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != secretMode {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(path, []byte("cut off"), secretMode); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadSecret(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a damaged secret: %v, want an error that names the file", err)
	}
}
