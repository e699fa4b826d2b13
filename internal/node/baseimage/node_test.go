package baseimage_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/baseimage"
)

// recordingMmdebstrap is a mmdebstrap that records what it is to install.
const recordingMmdebstrap = `
for a; do case $a in --include=*) echo "${a#--include=}" >>"$INCLUDED" ;; esac; done
` + makesRoot

// TestDebianNodeFallback builds with an unreachable registry: the image has Debian's Node.js, the result has
// a warning, and the next build tries npm again before it uses this image.
func TestDebianNodeFallback(t *testing.T) {
	needRoot(t)
	runs, included := filepath.Join(t.TempDir(), "runs"), filepath.Join(t.TempDir(), "included")
	t.Setenv("RUNS", runs)
	t.Setenv("INCLUDED", included)
	tries := filepath.Join(t.TempDir(), "tries")
	t.Setenv("TRIES", tries)
	cfg := baseimage.Config{
		Dir: t.TempDir(), Mmdebstrap: script(t, recordingMmdebstrap), Packages: []string{"git"},
		Npm: script(t, `echo run >>"$TRIES"; printf 'npm error network is down\nnpm error     at a place\n' >&2; exit 1`),
	}
	first, err := baseimage.Build(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(first.Warning, "Debian's") || !strings.HasSuffix(first.Warning, ": network is down") {
		t.Errorf("warning = %q", first.Warning)
	}
	if b, _ := os.ReadFile(included); strings.TrimSpace(string(b)) != "git,nodejs,npm" {
		t.Errorf("installed %q", b)
	}
	again, err := baseimage.Build(t.Context(), cfg, nil)
	if err != nil || !again.Cached || again.Digest != first.Digest || again.Warning == "" {
		t.Errorf("second build = %+v, %v", again, err)
	}
	wantRuns(t, runs, 1)
	wantRuns(t, tries, 2)
}

// TestWrongNodeIsRefused has a registry that serves other files than the pinned ones.
func TestWrongNodeIsRefused(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	_, err := baseimage.Build(t.Context(), baseimage.Config{
		Dir: dir, Mmdebstrap: "/bin/false",
		Npm: script(t, `for a; do case $a in *@*) echo other >"$(echo "$a" | tr @ -).tgz" ;; esac; done`),
	}, nil)
	message, _ := errs.PublicMessage(err)
	if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(message, "integrity") {
		t.Errorf("Build = %v, want the integrity to be refused", err)
	}
	wantOnlyLock(t, dir)
}

// TestUnreachableRegistry runs the real npm with an unreachable registry.
func TestUnreachableRegistry(t *testing.T) {
	needRoot(t)
	if _, err := exec.LookPath("npm"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("npm is missing in CI: run `make deps`")
		}
		t.Skip("SKIPPED: npm is missing: run `make deps`")
	}
	t.Setenv("RUNS", filepath.Join(t.TempDir(), "runs"))
	t.Setenv("npm_config_registry", "http://127.0.0.1:9")
	res, err := baseimage.Build(t.Context(), baseimage.Config{Dir: t.TempDir(), Mmdebstrap: script(t, makesRoot)}, nil)
	if err != nil || !strings.Contains(res.Warning, "ECONNREFUSED") || strings.Contains(res.Warning, "\n") {
		t.Errorf("Build = %+v, %v", res, err)
	}
}
