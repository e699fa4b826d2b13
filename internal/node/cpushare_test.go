package node

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"k8s.io/utils/cpuset"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// A sandbox that computes without a pause has the lowest priority, and a part of the processors, while one of another namespace runs
// commands, and its own weight again after.
func TestBusySandboxGivesWay(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.DefaultLimits.MilliCPU = int64(1000 * runtime.NumCPU()) })
	cgroup := func(s *agents.Sandbox) string { return n.host.Cgroup(string(n.handles.Lookup(s.UID).ID)) }
	tenant := func(s *agents.Sandbox) { s.Namespace = "busy" }
	busy, late, quick := object(class("gvisor"), tenant), object(class("gvisor"), tenant), object(class("gvisor"))
	ensure(t, n, busy)
	ensure(t, n, quick)
	if _, err := os.Stat(filepath.Join("/sys/fs/cgroup/cpu", cgroup(busy), "cpu.idle")); err != nil {
		t.Skip("SKIPPED: no cpu.idle of cgroup version 1 here")
	}
	shares := func(s *agents.Sandbox) string {
		b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/cpu", cgroup(s), "cpu.shares"))
		must(t, err)
		return strings.TrimSpace(string(b))
	}
	processors := func() int {
		b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/cpuset", cgroup(busy), "cpuset.cpus"))
		must(t, err)
		cpus, err := cpuset.Parse(strings.TrimSpace(string(b)))
		must(t, err)
		return cpus.Size()
	}
	before, all := shares(busy), processors()
	run(t, n, busy, fmt.Sprintf("for i in $(seq %d); do (while [ ! -e /stop ]; do :; done) >/dev/null 2>&1 & done", 2*runtime.NumCPU()))
	lowest := func(s *agents.Sandbox) bool {
		run(t, n, quick, "sleep 0.1") // without a rest it would be as busy
		got, err := cgroups.LowestCPU(cgroup(s))
		must(t, err)
		return got
	}
	eventually.True(t, "the busy sandbox has the lowest priority", func() bool { return lowest(busy) })
	if all > 1 {
		eventually.True(t, "it leaves a processor to others", func() bool { return lowest(busy) && processors() < all })
	}
	if lowest(quick) {
		t.Error("the sandbox that runs commands has the lowest priority too")
	}
	ensure(t, n, late)
	eventually.True(t, "a new sandbox of its namespace has it too", func() bool { return lowest(late) })
	run(t, n, busy, "touch /stop")
	eventually.True(t, "both have their own again", func() bool { return !lowest(busy) && !lowest(late) })
	if after := shares(busy); after != before || processors() != all {
		t.Errorf("cpu.shares %s, were %s; %d processors, were %d", after, before, processors(), all)
	}
}
