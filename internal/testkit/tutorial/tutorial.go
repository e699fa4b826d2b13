// Package tutorial does what a page of the documents tells its reader to do, for tests. It knows no server and no
// cluster: the test prepares the commands.
package tutorial

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// fences are the blocks of code of a page: language, name of a file, text.
var fences = regexp.MustCompile("(?s)```(\\w+)(?: (\\S+))?\n(.*?)```")

// Follow writes the files that blocks of code of a page name, into a directory of its own with the node_modules that modules
// names. It runs each block of shell that a block of text follows, which must be its output. In the text, … stands for
// anything in a line. command prepares a program as [exec.CommandContext] does, with the environment of the reader. With the
// titles of sections it follows these alone.
func Follow(t *testing.T, page, modules string, command func(ctx context.Context, name string, args ...string) *exec.Cmd, sections ...string) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if modules, err = filepath.Abs(modules); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	whole := string(text)
	if len(sections) > 0 {
		whole = only(t, whole, sections)
	}
	blocks := fences.FindAllStringSubmatch(whole, -1)
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
		cmd := command(t.Context(), "bash", "-u", "-c", b[3])
		cmd.Dir = dir
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

// only returns the sections of a page that have these titles.
func only(t *testing.T, page string, titles []string) (kept string) {
	t.Helper()
	for _, title := range titles {
		_, section, found := strings.Cut(page, "\n## "+title+"\n")
		if !found {
			t.Fatalf("the page has no section %q", title)
		}
		section, _, _ = strings.Cut(section, "\n## ")
		kept += section
	}
	return kept
}
