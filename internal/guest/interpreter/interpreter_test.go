package interpreter_test

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/interpreter"
)

// TestFilesParse finds errors of syntax without a sandbox; test/e2e runs the program.
func TestFilesParse(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, interpreter.Files()); err != nil {
		t.Fatal(err)
	}
	checks := map[string][]string{".py": {"python3", "-m", "py_compile"}, ".js": {"node", "--check"}}
	seen := map[string]int{}
	err := fs.WalkDir(interpreter.Files(), ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		seen[path.Ext(name)]++
		switch check, ok := checks[path.Ext(name)]; {
		case ok:
			if program, _ := exec.LookPath(check[0]); program == "" {
				t.Logf("%s is missing: %s is not checked", check[0], name)
			} else if out, err := exec.CommandContext(t.Context(), check[0], append(check[1:], filepath.Join(dir, name))...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", name, err, out)
			}
		case path.Ext(name) == ".json":
			data, err := fs.ReadFile(interpreter.Files(), name)
			if err != nil {
				return err
			}
			var spec struct{ Argv []string }
			if err := json.Unmarshal(data, &spec); err != nil || !strings.Contains(strings.Join(spec.Argv, " "), "{connection_file}") {
				t.Errorf("%s: %v: %s", name, err, data)
			}
		default:
			t.Errorf("%s is in the image", name)
		}
		return nil
	})
	if err != nil || seen[".py"] < 5 || seen[".js"] != 1 || seen[".json"] != 3 {
		t.Errorf("files by kind: %v, %v", seen, err)
	}
}
