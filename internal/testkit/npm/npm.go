// Package npm installs packages of the npm registry for tests, into the cache of builds, so that
// each version is fetched once. It is for tests alone, and runs nothing of the packages.
package npm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	tries      = 3
	tryTimeout = 2 * time.Minute
)

// Package returns a directory with node_modules of one package, such as "e2b@2.51.0".
func Package(t testing.TB, spec string) string {
	t.Helper()
	return install(t, strings.ReplaceAll(strings.TrimPrefix(spec, "@"), "@", "-"), nil, "install", spec)
}

// Locked returns a directory with node_modules as the package-lock.json in dir has them.
func Locked(t testing.TB, dir string) string {
	t.Helper()
	files, sum := map[string][]byte{}, sha256.New()
	for _, name := range []string{"package.json", "package-lock.json"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = sum.Write(data) // never fails
		files[name] = data
	}
	return install(t, "lock-"+hex.EncodeToString(sum.Sum(nil))[:16], files, "ci")
}

var linking sync.Mutex

// Link puts node_modules into dir, as the package-lock.json there has them.
func Link(t testing.TB, dir string) {
	t.Helper()
	linking.Lock()
	defer linking.Unlock()
	here, modules := filepath.Join(dir, "node_modules"), filepath.Join(Locked(t, dir), "node_modules")
	if to, err := os.Readlink(here); err == nil && to == modules {
		return
	}
	if err := errors.Join(os.RemoveAll(here), os.Symlink(modules, here)); err != nil {
		t.Fatal(err)
	}
}

// run runs npm, again if it takes too long: a connection to a registry may hang, and npm itself waits for a quarter of an hour.
func run(t testing.TB, args []string) (out []byte, err error) {
	for range tries {
		ctx, cancel := context.WithTimeout(t.Context(), tryTimeout)
		cmd := exec.CommandContext(ctx, "npm", append(args, "--fetch-timeout=30000")...)
		cmd.WaitDelay = time.Second
		out, err = cmd.CombinedOutput()
		late := ctx.Err() != nil
		cancel()
		if err == nil || !late {
			break
		}
	}
	return out, err
}

// install runs npm with the files in a directory of that name, unless it is there.
func install(t testing.TB, name string, files map[string][]byte, args ...string) string {
	t.Helper()
	lacking := t.Skipf
	if os.Getenv("CI") == "true" {
		lacking = t.Fatalf
	}
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			lacking("SKIPPED: %s is missing, so real clients are NOT tested", tool)
		}
	}
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	home := filepath.Join(cache, "npm", name)
	if _, err := os.Stat(home); err == nil {
		return home
	}
	// Installed aside and moved in one step, so that a test beside this one never sees a half.
	if err := os.MkdirAll(filepath.Dir(home), 0o755); err != nil {
		t.Fatal(err)
	}
	aside, err := os.MkdirTemp(filepath.Dir(home), ".install-") //nolint:usetesting // must lie on the cache's file system
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(aside) })
	for file, data := range files {
		if err := os.WriteFile(filepath.Join(aside, file), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := run(t, append(args, "--silent", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", aside)); err != nil {
		lacking("SKIPPED: npm %s: %v, so real clients are NOT tested\n%s", strings.Join(args, " "), err, out)
	}
	if err := os.Rename(aside, home); err != nil {
		if _, beaten := os.Stat(home); beaten != nil {
			t.Fatal(err)
		}
	}
	return home
}
