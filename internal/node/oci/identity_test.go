package oci

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// Every start and every restore has its own boot ID.
func TestBootIDs(t *testing.T) {
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	const question = "bootid"
	seen := map[string]bool{}
	fresh := func(b *testSandbox) {
		t.Helper()
		id := b.query(t, question)
		if !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(id) || seen[id] {
			t.Errorf("%s has boot ID %q, seen were %v", b.id, id, seen)
		}
		seen[id] = true
		b.expect(t, question, id) // and it does not change
	}
	fresh(first)
	image := first.checkpoint(t, CheckpointOptions{})
	forks := []*testSandbox{first.copyOf(t), first.copyOf(t)}
	for _, f := range forks {
		fresh(f.restore(t, image, RestoreOptions{Background: true}))
	}
	must(t, l.Remove(t.Context(), first.id, first.spec.CgroupsPath))
	first.readdress(t)
	fresh(first.restore(t, image, RestoreOptions{}))
	must(t, l.Remove(t.Context(), first.id, first.spec.CgroupsPath))
	first.readdress(t)
	fresh(first.run(t))
	if got := first.query(t, "write "+bootIDPath+" mine"); got == "ok" {
		t.Error("a program may write the boot ID")
	}
}

// Processes read the files that the node writes before a restore, even if they had read earlier
// versions: in the agent's directory, and in the root.
func TestFilesChangedBeforeRestore(t *testing.T) {
	l := newTestHost(t)
	agent, err := probe()
	must(t, err)
	own := func(dir string) func(*Sandbox) { return func(s *Sandbox) { s.AgentDir = dir } }
	dirs := []string{t.TempDir(), t.TempDir()}
	for i, dir := range dirs {
		must(t, os.Link(filepath.Join(agent, "agent"), filepath.Join(dir, "agent")))
		must(t, os.WriteFile(filepath.Join(dir, "config"), []byte([]string{"old", "of another"}[i]), 0o600))
	}
	first := l.newSandbox(t, own(dirs[0]))
	must(t, os.MkdirAll(filepath.Join(first.rootfs, "etc"), 0o755))
	hosts := func(b *testSandbox, text string) {
		path := filepath.Join(b.rootfs, "etc/hosts")
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	hosts(first, "old hosts")
	first.run(t)
	first.expect(t, "keep /etc/hosts", "old hosts") // permanently
	first.expect(t, "read /etc/hosts", "old hosts")
	first.expect(t, "read "+AgentDir+"/config", "old")
	image := first.checkpoint(t, CheckpointOptions{})

	next := first.copyOf(t, own(dirs[1]))
	hosts(next, "hosts of the next, which are longer")
	next.restore(t, image, RestoreOptions{Background: true})
	next.expect(t, "read "+AgentDir+"/config", "of another")
	next.expect(t, "read /etc/hosts", "hosts of the next, which are longer")
	next.expect(t, "kept", "hosts of the next, which are longer")

	must(t, l.Remove(t.Context(), first.id, first.spec.CgroupsPath))
	first.readdress(t)
	must(t, os.WriteFile(filepath.Join(dirs[0], "config.tmp"), []byte("new, and longer"), 0o600))
	must(t, os.Rename(filepath.Join(dirs[0], "config.tmp"), filepath.Join(dirs[0], "config")))
	hosts(first, "new")
	first.restore(t, image, RestoreOptions{})
	first.expect(t, "read "+AgentDir+"/config", "new, and longer")
	first.expect(t, "read /etc/hosts", "new")
	first.expect(t, "kept", "new")
}
