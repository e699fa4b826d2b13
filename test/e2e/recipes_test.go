package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// testRecipes runs the recipes of docs/recipes.md as they are written there.
func testRecipes(t *testing.T, s *server) {
	page, err := os.ReadFile("../../docs/recipes.md")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]*regexp.Regexp{"forks": regexp.MustCompile(`^4[0-9]\n$`), "evaluation": regexp.MustCompile(`^3\n$`)}
	for _, m := range regexp.MustCompile("(?s)```sh\n# recipe: (\\w+)\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		name, script := m[1], m[2]
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "bash", "-eu", "-c", script)
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(programs.barchan)+":"+os.Getenv("PATH"), "BARCHAN_API_URL=http://"+s.http, "BARCHAN_API_KEY="+s.localKey())
			var stderr strings.Builder
			cmd.Stderr = &stderr
			if out, err := cmd.Output(); err != nil || !want[name].Match(out) {
				t.Errorf("%v: printed %q\n%s", err, out, stderr.String())
			}
		})
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("the page lacks %v", want)
	}
}
