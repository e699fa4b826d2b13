package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// onlyLive compares what lies on the machine with the sandboxes that the API server has: each
// running one has its namespace, link, mount, cgroup and files, and there is nothing else.
func (s *server) onlyLive() error {
	out, err := s.kubectl("", "get", "sandboxes", "-A", "-o", `jsonpath={range .items[*]}{.status.barchan.id} {.status.barchan.phase}{"\n"}{end}`)
	if err != nil {
		return fmt.Errorf("kubectl: %w\n%s", err, out)
	}
	var want []string
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 2 && f[1] != "Dead" && f[1] != "Pending" {
			want = append(want, f[0])
		}
	}
	slices.Sort(want)
	for what, got := range s.traces() {
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("%s: %d, of sandboxes that live: %d\n  have %v\n  want %v", what, len(got), len(want), got, want)
		}
	}
	return nil
}

// traces are the sandboxes' IDs in the names of what is on the machine.
func (s *server) traces() map[string][]string {
	tag, prefix := s.value("BARCHAN_BRIDGE_NAME"), s.value("BARCHAN_NETNS_PREFIX")
	all := map[string][]string{}
	namespaces, _ := os.ReadDir("/run/netns")
	all["network namespaces"] = nil
	for _, e := range namespaces {
		if id, ok := strings.CutPrefix(e.Name(), prefix); ok && len(id) == 20 {
			all["network namespaces"] = append(all["network namespaces"], id)
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mounts")
	all["root filesystems"] = nil
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[1], s.dir+"/") && filepath.Base(f[1]) == "rootfs" {
			all["root filesystems"] = append(all["root filesystems"], filepath.Base(filepath.Dir(f[1])))
		}
	}
	all["cgroups"] = nil
	for _, pattern := range []string{"/sys/fs/cgroup/" + tag + "/*", "/sys/fs/cgroup/memory/" + tag + "/*"} {
		found, _ := filepath.Glob(pattern)
		for _, f := range found {
			if info, err := os.Stat(f); err == nil && info.IsDir() {
				all["cgroups"] = append(all["cgroups"], filepath.Base(f))
			}
		}
	}
	// Those made ahead are down.
	links, _ := exec.Command("sh", "-c", "ip -o link show master "+tag+" up | wc -l").Output()
	count := 0
	_, _ = fmt.Sscan(string(links), &count)
	if count != len(all["network namespaces"]) {
		all[fmt.Sprintf("links (%d of them)", count)] = []string{"?"}
	}
	return all
}
