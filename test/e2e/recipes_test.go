package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// testRecipes runs the tutorials and recipes of docs that need the base image alone.
func testRecipes(t *testing.T, s *server) {
	installSDK(t)
	for _, page := range []string{"recipes", "tutorial-program", "tutorial-evaluation", "tutorial-forks"} {
		t.Run(page, func(t *testing.T) { s.in(t).follow(t, page) })
	}
}

// fences are the blocks of code of a page: language, name of a file, text.
var fences = regexp.MustCompile("(?s)```(\\w+)(?: (\\S+))?\n(.*?)```")

// follow does what a page of docs says, in a directory of its own: it writes the files that blocks of code name, and runs
// each block of shell that a block of text follows, which it must print. In the text, … stands for anything in a line.
func (s *server) follow(t *testing.T, page string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + page + ".md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	modules, err := filepath.Abs("sdk/node_modules")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	env := append(s.clientEnv(), "PATH="+filepath.Dir(programs.barchan)+":"+os.Getenv("PATH"), "BARCHAN_API_URL=http://"+s.http, "BARCHAN_API_KEY="+s.localKey())
	blocks := fences.FindAllStringSubmatch(string(text), -1)
	ran := 0
	for i, b := range blocks {
		if b[2] != "" {
			if err := os.WriteFile(filepath.Join(dir, b[2]), []byte(b[3]), 0o600); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if b[1] != "sh" || i+1 == len(blocks) || blocks[i+1][1] != "text" || blocks[i+1][2] != "" {
			continue
		}
		ran++
		cmd := exec.CommandContext(t.Context(), "bash", "-u", "-c", b[3])
		cmd.Dir, cmd.Env = dir, env
		var stderr strings.Builder
		cmd.Stderr = &stderr
		want := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(blocks[i+1][3]), "…", "[^\n]*") + "$")
		if out, err := cmd.Output(); err != nil || !want.Match(out) {
			t.Fatalf("%s\n%v: printed\n%s%s\nwant\n%s", b[3], err, out, stderr.String(), blocks[i+1][3])
		}
	}
	if ran == 0 {
		t.Errorf("%s has nothing to run", page)
	}
}
