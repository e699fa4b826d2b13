package dashboard

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

// typescript is the compiler that checks the scripts of the page, which run as they are.
const typescript = "typescript@5.9.3"

// TestTypes checks the scripts of the page by the types of the OpenAPI document: what they send, and the fields that they read.
func TestTypes(t *testing.T) {
	compiler := filepath.Join(npm.Package(t, typescript), "node_modules", "typescript", "bin", "tsc")
	dir := t.TempDir()
	for pattern, into := range map[string]string{"web/*.js": "", "types/*.ts": "", "types/tsconfig.json": "", "types/vendor/*": "vendor"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %d files", pattern, err, len(files))
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			to := filepath.Join(dir, into, filepath.Base(file))
			if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(to, text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	out, err := exec.CommandContext(t.Context(), "node", compiler, "-p", dir).CombinedOutput()
	if err != nil {
		t.Errorf("tsc: %v\n%s", err, out)
	}
}
