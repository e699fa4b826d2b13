package toolchain_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
)

func program(t *testing.T, dir, name, body string) string {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func finder(t *testing.T, paths map[string]string) *toolchain.Finder {
	t.Helper()
	f, err := toolchain.New(toolchain.Config{Paths: paths})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFindOrder(t *testing.T) {
	cache, inPath := t.TempDir(), t.TempDir()
	t.Setenv(toolchain.EnvCache, cache)
	t.Setenv("PATH", inPath)
	want := func(paths map[string]string, want string) {
		t.Helper()
		got, err := finder(t, paths).Find(toolchain.Mmdebstrap)
		if err != nil || got != want {
			t.Errorf("Find = %s, %v, want %s", got, err, want)
		}
	}
	// From the last place to the first.
	want(nil, program(t, inPath, "mmdebstrap", "true"))
	want(nil, program(t, filepath.Join(cache, "bin"), "mmdebstrap", "true"))
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sibling := program(t, filepath.Dir(self), "mmdebstrap", "true")
	t.Cleanup(func() {
		if err := os.Remove(sibling); err != nil {
			t.Error(err)
		}
	})
	want(nil, sibling)
	configured := program(t, t.TempDir(), "other-name", "true")
	want(map[string]string{toolchain.Mmdebstrap: configured}, configured)
	want(map[string]string{toolchain.Mmdebstrap: ""}, sibling)
}

func TestConfiguredPathHasNoFallback(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	program(t, dir, "runc", "echo runc version 1.2.0")
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{
		"no such file": "/nonexistent/runc", "directory": dir, "not executable": plain,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := finder(t, map[string]string{toolchain.Runc: path}).Check(t.Context(), toolchain.Runc)
			message, _ := errs.PublicMessage(err)
			if !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(message, path) || !strings.Contains(message, name) {
				t.Errorf("Check = %v", err)
			}
		})
	}
}

func TestMissingProgramError(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv(toolchain.EnvCache, t.TempDir())
	_, err := finder(t, nil).Check(t.Context(), toolchain.Mmdebstrap)
	message, ok := errs.PublicMessage(err)
	if !ok || !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(message, "make deps") {
		t.Errorf("Check = %v", err)
	}
}

func TestNewRefusesUnknown(t *testing.T) {
	_, err := toolchain.New(toolchain.Config{Paths: map[string]string{"crun": "/usr/bin/crun"}})
	if !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("New = %v, want ErrInvalid", err)
	}
}

func TestCheckVersions(t *testing.T) {
	tests := map[string]struct {
		name, body string
		want       string // the version
		fault      string // part of the message
	}{
		"runc":           {name: toolchain.Runc, body: "printf 'runc version 1.1.5+ds1\\nspec: 1.0.2\\n'", want: "1.1.5+ds1"},
		"containerd":     {name: toolchain.Containerd, body: "echo containerd github.com/containerd/containerd/v2 v2.4.2 abc", want: "2.4.2"},
		"runsc release":  {name: toolchain.Runsc, body: "echo runsc version release-20260105.0", want: "release-20260105.0"},
		"runsc module":   {name: toolchain.Runsc, body: "echo runsc version v0.0.0-2026-abc", want: "0.0.0-2026-abc"},
		"old containerd": {name: toolchain.Containerd, body: "echo containerd x v1.7.30", fault: "too old, 2.0 or newer"},
		"old runc":       {name: toolchain.Runc, body: "echo runc version 1.0.9", fault: "too old"},
		"no output":      {name: toolchain.Runc, body: "true", fault: "prints no version"},
		"broken":         {name: toolchain.Runc, body: "echo cannot load libfoo >&2; exit 127", fault: "cannot load libfoo"},
		"agent a script": {name: toolchain.Agent, body: "echo 0.6.13", fault: "cannot run in every image"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			path := program(t, t.TempDir(), "program", tt.body)
			got, err := finder(t, map[string]string{tt.name: path}).Check(t.Context(), tt.name)
			message, _ := errs.PublicMessage(err)
			switch {
			case tt.fault != "" && (!errors.Is(err, errs.ErrUnavailable) || !strings.Contains(message, tt.fault)):
				t.Errorf("Check = %+v, %v, want an error with %q", got, err, tt.fault)
			case tt.fault == "" && (err != nil || got.Version != tt.want || got.Path != path):
				t.Errorf("Check = %+v, %v, want version %s", got, err, tt.want)
			}
		})
	}
}

// TestRealPrograms checks the programs that make builds or installs.
func TestRealPrograms(t *testing.T) {
	f := finder(t, nil)
	for _, name := range []string{toolchain.Runsc, toolchain.Runc, toolchain.Containerd, toolchain.Mmdebstrap} {
		t.Run(name, func(t *testing.T) {
			if _, err := f.Find(name); err != nil && os.Getenv("CI") == "" {
				t.Skipf("SKIPPED: %v", err)
			}
			p, err := f.Check(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%+v", p)
		})
	}
}
