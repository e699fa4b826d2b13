package baseimage_test

import (
	"archive/tar"
	"context"
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/baseimage"
)

// noNpm is an npm that always fails, for tests of Debian's part.
const noNpm = "/bin/false"

// needRoot skips with a log line without root, and in CI fails without mmdebstrap.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
}

func needMmdebstrap(t *testing.T) {
	t.Helper()
	needRoot(t)
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("mmdebstrap is missing in CI: run `make deps`")
		}
		t.Skip("SKIPPED: mmdebstrap is missing: run `make deps`")
	}
}

// script writes a fake mmdebstrap, for tests of the code around it.
func script(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mmdebstrap")
	if err := os.WriteFile(path, []byte("#!/bin/sh\nset -eu\n"+body), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

const makesRoot = `
echo "I: running apt-get update..." >&2
echo "I: creating tarball..." >&2
mkdir root && echo hello >root/hello
echo run >>"$RUNS"
tar --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C root -c .
`

// TestRealImage builds the default image, or finds it in the cache, and checks its content.
func TestRealImage(t *testing.T) {
	needMmdebstrap(t)
	var last baseimage.Progress
	res, err := baseimage.Build(t.Context(), baseimage.Config{}, func(p baseimage.Progress) {
		if p.Percent < last.Percent {
			t.Errorf("progress fell from %+v to %+v", last, p)
		}
		last = p
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", res)
	if last.Percent != 100 {
		t.Errorf("last progress %+v", last)
	}
	img := readImage(t, res.Path)
	if img.name != baseimage.DefaultRef || img.digest != res.Digest {
		t.Errorf("index names %s %s, want %s %s", img.name, img.digest, baseimage.DefaultRef, res.Digest)
	}
	cfg := img.config.Config
	if cfg.User != "" || cfg.WorkingDir != "/home/user" || cfg.Labels[baseimage.LabelInputs] != res.Inputs {
		t.Errorf("config = %+v", cfg)
	}
	if !strings.HasPrefix(cfg.Env[0], "PATH=/usr/local/sbin:/usr/local/bin:") {
		t.Errorf("env = %v", cfg.Env)
	}
	checkPrograms(t, img.files)
	checkUser(t, img.files)
	checkClean(t, img.files)
}

func checkPrograms(t *testing.T, files map[string]entry) {
	t.Helper()
	for _, name := range []string{
		"usr/bin/bash", "usr/bin/sudo", "usr/bin/git", "usr/bin/curl", "usr/bin/tput", "usr/bin/less",
		"usr/bin/xz", "usr/bin/ps", "usr/bin/apt-get", "etc/ssl/certs/ca-certificates.crt",
		"usr/bin/gcc", "usr/bin/g++", "usr/bin/make", "usr/bin/pip", "usr/bin/pip3", "usr/bin/python3-config",
		"usr/local/bin/node", "usr/local/lib/node_modules/npm/package.json", "usr/lib/locale/locale-archive",
		"dev", "proc", "sys", "tmp", "etc/hosts", "etc/resolv.conf", "etc/hostname",
	} {
		if _, ok := files[name]; !ok {
			t.Errorf("%s is missing", name)
		}
	}
	if l := files["usr/bin/python"].Linkname; l != "python3" {
		t.Errorf("python -> %q", l)
	}
	for _, link := range []string{"npm", "npx"} {
		to := path.Join("usr/local/bin", files["usr/local/bin/"+link].Linkname)
		if m := files[to].Mode; m&0o111 == 0 {
			t.Errorf("%s -> %s, of mode %o", link, to, m)
		}
	}
	if _, ok := files["usr/lib/python3.11/EXTERNALLY-MANAGED"]; ok {
		t.Error("pip will refuse to install")
	}
	if m := files["usr/bin/sudo"].Mode & 0o4000; m == 0 {
		t.Error("sudo is not setuid")
	}
}

func checkUser(t *testing.T, files map[string]entry) {
	t.Helper()
	if h := files["home/user"]; h.Uid != 1000 || h.Gid != 1000 {
		t.Errorf("home/user belongs to %d:%d", h.Uid, h.Gid)
	}
	if h := files["etc/sudoers.d/user"]; h.Mode&0o777 != 0o440 || !strings.Contains(h.data, "NOPASSWD: ALL") {
		t.Errorf("sudoers.d/user is %o %q", h.Mode, h.data)
	}
	profile := files["etc/profile"].data + files["root/.profile"].data
	if !strings.Contains(profile, "PATH=") || strings.Contains(profile, `"$(id -u)"`) || strings.Contains(profile, "\nmesg n") {
		t.Errorf("a login shell starts a process: %s", profile)
	}
	if !strings.Contains(files["etc/passwd"].data, "\nuser:x:1000:1000::/home/user:/bin/bash\n") {
		t.Errorf("passwd = %s", files["etc/passwd"].data)
	}
}

// checkClean fails if temporary files of the build remain.
func checkClean(t *testing.T, files map[string]entry) {
	t.Helper()
	if !strings.Contains(files["etc/hosts"].data, "127.0.0.1\tlocalhost") {
		t.Errorf("hosts = %q", files["etc/hosts"].data)
	}
	if d := files["etc/machine-id"].data; d != "" {
		t.Errorf("machine-id = %q", d)
	}
	for name, f := range files {
		under := func(dir string) bool { return strings.HasPrefix(name, dir) && f.Size > 0 }
		if under("var/lib/apt/lists/") || under("var/cache/apt/") || under("etc/apt/apt.conf.d/99") {
			t.Errorf("%s (%d bytes) remains from the build", name, f.Size)
		}
		if f.Typeflag == tar.TypeChar || f.Typeflag == tar.TypeBlock {
			t.Errorf("%s is a device", name)
		}
	}
}

// TestCancelledBuildLeavesNothing cancels a real build.
func TestCancelledBuildLeavesNothing(t *testing.T) {
	needMmdebstrap(t)
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := baseimage.Build(ctx, baseimage.Config{Dir: dir}, func(p baseimage.Progress) {
		if p.Step == "extract packages" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Build = %v, want canceled", err)
	}
	wantOnlyLock(t, dir)
}

func TestUnreachableMirror(t *testing.T) {
	needMmdebstrap(t)
	dir := t.TempDir()
	_, err := baseimage.Build(t.Context(), baseimage.Config{
		Dir: dir, Npm: noNpm,
		Sources: []string{"deb http://127.0.0.1:9/debian bookworm main"},
	}, nil)
	message, ok := errs.PublicMessage(err)
	if !ok || !errors.Is(err, errs.ErrUnavailable) {
		t.Fatalf("Build = %v, want unavailable with a public message", err)
	}
	for _, want := range []string{"read package lists", "mirror", "127.0.0.1"} {
		if !strings.Contains(message, want) {
			t.Errorf("message %q lacks %q", message, want)
		}
	}
	wantOnlyLock(t, dir)
}

func TestMissingProgram(t *testing.T) {
	needRoot(t)
	_, err := baseimage.Build(t.Context(), baseimage.Config{
		Dir: t.TempDir(), Npm: noNpm, Mmdebstrap: "/nonexistent/mmdebstrap",
	}, nil)
	if message, _ := errs.PublicMessage(err); !strings.Contains(message, "apt-get install mmdebstrap") {
		t.Errorf("Build = %v, want the missing program", err)
	}
}

func TestRefusedConfigs(t *testing.T) {
	for name, cfg := range map[string]baseimage.Config{
		"name":        {Name: "../base"},
		"ref":         {Ref: "Not A Ref"},
		"ref no tag":  {Ref: "barchan.local/base"},
		"suite":       {Suite: "--help"},
		"package":     {Packages: []string{"git", "--variant=apt"}},
		"source":      {Sources: []string{"http://mirror.example"}},
		"source line": {Sources: []string{"deb http://x/ bookworm main\ndeb http://y/ z main"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Dir = t.TempDir()
			_, err := baseimage.Build(t.Context(), cfg, nil)
			if !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("Build = %v, want ErrInvalid", err)
			}
			if left, _ := os.ReadDir(cfg.Dir); len(left) != 0 {
				t.Errorf("remaining: %v", left)
			}
		})
	}
}

// TestBuildOnce runs concurrent builds: one builds the image, and the others wait and find it.
func TestBuildOnce(t *testing.T) {
	needRoot(t)
	runs := filepath.Join(t.TempDir(), "runs")
	t.Setenv("RUNS", runs)
	cfg := baseimage.Config{
		Dir: t.TempDir(), Npm: noNpm, Mmdebstrap: script(t, makesRoot), Epoch: time.Unix(1e9, 0),
		Ref: "example.test/small:v1",
	}
	results := make([]baseimage.Result, 4)
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() {
			var err error
			if results[i], err = baseimage.Build(t.Context(), cfg, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	wantRuns(t, runs, 1)
	fresh := 0
	for _, r := range results {
		if !r.Cached {
			fresh++
		}
		if r.Path != results[0].Path || r.Digest != results[0].Digest {
			t.Errorf("%+v differs from %+v", r, results[0])
		}
	}
	if fresh != 1 {
		t.Errorf("%d builds were fresh, want 1", fresh)
	}
	img := readImage(t, results[0].Path)
	if img.files["hello"].data != "hello\n" || img.name != "example.test/small:v1" {
		t.Errorf("image = %+v", img)
	}

	cfg.Rebuild = true
	again, err := baseimage.Build(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantRuns(t, runs, 2)
	if again.Digest != results[0].Digest {
		t.Errorf("a rebuild of the same gave %s after %s", again.Digest, results[0].Digest)
	}
}

// TestInputsChangeName checks that each input changes the name of the image.
func TestInputsChangeName(t *testing.T) {
	needRoot(t)
	t.Setenv("RUNS", filepath.Join(t.TempDir(), "runs"))
	base := baseimage.Config{Dir: t.TempDir(), Npm: noNpm, Mmdebstrap: script(t, makesRoot), Packages: []string{"git", "curl"}}
	seen := map[string]string{}
	build := func(name string, cfg baseimage.Config) string {
		t.Helper()
		res, err := baseimage.Build(t.Context(), cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		if other, taken := seen[res.Inputs]; taken {
			t.Errorf("%s has the inputs of %s", name, other)
		}
		seen[res.Inputs] = name
		return res.Inputs
	}
	first := build("first", base)
	reordered := base
	reordered.Packages = []string{"curl", "git", "git"}
	if res, err := baseimage.Build(t.Context(), reordered, nil); err != nil || !res.Cached || res.Inputs != first {
		t.Errorf("the order of packages matters: %+v, %v", res, err)
	}
	for name, change := range map[string]func(*baseimage.Config){
		"suite":   func(c *baseimage.Config) { c.Suite = "trixie" },
		"file":    func(c *baseimage.Config) { c.Files = fstest.MapFS{"a/b": {Data: []byte("1")}} },
		"content": func(c *baseimage.Config) { c.Files = fstest.MapFS{"a/b": {Data: []byte("2")}} },
		"path":    func(c *baseimage.Config) { c.Files = fstest.MapFS{"a/c": {Data: []byte("2")}} },
		"ref":     func(c *baseimage.Config) { c.Ref = "a.test/b:c" },
		"package": func(c *baseimage.Config) { c.Packages = []string{"git"} },
		"source":  func(c *baseimage.Config) { c.Sources = []string{"deb http://a.test/ bookworm main"} },
	} {
		cfg := base
		change(&cfg)
		build(name, cfg)
	}
}

// TestDamagedImageIsRebuilt truncates a finished image.
func TestDamagedImageIsRebuilt(t *testing.T) {
	needRoot(t)
	t.Setenv("RUNS", filepath.Join(t.TempDir(), "runs"))
	cfg := baseimage.Config{Dir: t.TempDir(), Npm: noNpm, Mmdebstrap: script(t, makesRoot)}
	res, err := baseimage.Build(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(res.Path, res.Size/2); err != nil {
		t.Fatal(err)
	}
	again, err := baseimage.Build(t.Context(), cfg, nil)
	if err != nil || again.Cached || again.Size != res.Size {
		t.Errorf("Build = %+v, %v, want a fresh image of %d bytes", again, err, res.Size)
	}
}

// TestFailureShowsLastOutput also leaves files of a killed build; the next build removes them.
func TestFailureShowsLastOutput(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	stale := filepath.Join(dir, ".build-123", "root")
	if err := os.MkdirAll(stale, 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := baseimage.Build(t.Context(), baseimage.Config{Dir: dir, Npm: noNpm, Mmdebstrap: script(t, `
echo "I: installing essential packages..." >&2
echo "E: no space on the moon" >&2
printf 'half a tar'
exit 7
`)}, nil)
	message, _ := errs.PublicMessage(err)
	if !strings.Contains(message, "install essential packages") || !strings.Contains(message, "no space on the moon") {
		t.Errorf("Build = %v", err)
	}
	wantOnlyLock(t, dir)
}

// TestCancelKillsAll cancels a build whose program has child processes that never exit; Build returns only
// after the end of all of them.
func TestCancelKillsAll(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := baseimage.Build(ctx, baseimage.Config{Dir: dir, Npm: noNpm, Mmdebstrap: script(t, `
mount -t tmpfs none "$TMPDIR" && echo kept >"$TMPDIR/file"
(trap '' TERM INT HUP; while :; do sleep 1; done) &
echo "I: extracting archives..." >&2
wait
`)}, func(p baseimage.Progress) {
		if p.Step == "extract packages" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Build = %v, want canceled", err)
	}
	wantOnlyLock(t, dir)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), dir) {
		t.Errorf("something is mounted below %s", dir)
	}
}

func TestLockWaitCancelled(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	fails := script(t, `
echo "I: extracting archives..." >&2
exit 1
`)
	holding, release := make(chan struct{}), make(chan struct{})
	held := sync.OnceFunc(func() { close(holding) })
	var wg sync.WaitGroup
	wg.Go(func() {
		defer held()
		_, err := baseimage.Build(t.Context(), baseimage.Config{Dir: dir, Npm: noNpm, Mmdebstrap: fails}, func(p baseimage.Progress) {
			if p.Step == "extract packages" {
				held()
				<-release
			}
		})
		if err == nil {
			t.Error("the holder's build should have failed")
		}
	})
	<-holding
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := baseimage.Build(ctx, baseimage.Config{Dir: dir, Npm: noNpm, Mmdebstrap: "/bin/false"}, func(p baseimage.Progress) {
		if p.Step == "wait for another build" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Build = %v, want canceled", err)
	}
	close(release)
	wg.Wait()
}

func wantOnlyLock(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if e.Name() != ".lock" {
			t.Errorf("%s remains", e.Name())
		}
	}
}

func wantRuns(t *testing.T, file string, want int) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(data), "run\n"); got != want {
		t.Errorf("%d runs of mmdebstrap, want %d", got, want)
	}
}
