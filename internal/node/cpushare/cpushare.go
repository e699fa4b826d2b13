// Package cpushare keeps sandboxes quick beside others that compute without a pause. While the processors are contended, those that
// use more than their share get the kernel's lowest priority, cpu.idle of their cgroup: they have what others leave, and
// give way at once to a process that wakes in another sandbox. They are raised again once they use little. The same holds for
// namespaces: all sandboxes of one that uses more than its share are lowered, also those that it starts meanwhile. If all lowered ones
// together use more than three quarters of the processors, and other sandboxes work, they run on three quarters of them alone: on all
// but one of two to seven.
//
// It is for cgroups of version 1 and 2, on Linux 5.15 and later; before, and where a sandbox has asked for a share, it changes nothing.
// At rest it reads /proc/uptime five times a second, and no cgroup.
package cpushare

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/cpuset"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// period is the time between two samples.
const period = 200 * time.Millisecond

// Config configures a Balancer. All fields are required.
type Config struct {
	Registry *registry.Registry
	// Cgroup returns the path of a sandbox's cgroup, relative to the mount point.
	Cgroup func(id string) string
	// Lowered has how many sandboxes have the lowest priority.
	Lowered prometheus.Gauge
	Log     *slog.Logger
}

// priority is the way in which a sandbox is lowered.
type priority struct {
	lowest   bool // cpu.idle
	confined bool // to a part of the processors
}

// Balancer changes priorities. Only Run uses it.
type Balancer struct {
	cfg                   Config
	sandboxes, namespaces *policy
	confinement           confinement
	lowered               map[string]priority      // of the cgroups that have not their own
	seen                  map[string]time.Duration // the processor time of each cgroup, when last read
	read                  time.Time                // when that was
	idle                  float64                  // the part of all processor time that was idle: an average
	idleTime              time.Duration            // of all processors, since the start of the machine
	sampled               time.Time
}

// New returns a Balancer.
func New(cfg Config) *Balancer {
	n := runtime.NumCPU()
	return &Balancer{
		cfg: cfg, sandboxes: newPolicy(), namespaces: newPolicy(), confinement: confinement{cores: float64(n - reserved(n))},
		lowered: map[string]priority{}, idle: 1,
	}
}

// Run changes priorities until ctx is done. It then leaves them: a restarted server finds them as they are.
func (b *Balancer) Run(ctx context.Context) {
	if err := b.adopt(); err != nil {
		b.cfg.Log.WarnContext(ctx, "priorities of sandboxes not read", telemetry.Error, err)
	}
	var last string
	_ = lifecycle.Every(ctx, period, func() {
		// An error lasts, as a rule.
		text := ""
		if err := b.sample(ctx, time.Now()); err != nil {
			text = err.Error()
		}
		if text != "" && text != last {
			b.cfg.Log.WarnContext(ctx, "priorities of sandboxes not changed", telemetry.Error, text)
		}
		last = text
	})
}

// sandbox is one that may be lowered.
type sandbox struct {
	namespace string
	weight    uint64 // in the unit of cpu.shares
}

// running returns the sandboxes that may be lowered, by their cgroups, of which some may not exist. A stored one has none: of
// thousands, looking for them in vain would be most of the server's work.
func (b *Balancer) running() map[string]sandbox {
	all := map[string]sandbox{}
	for _, u := range b.cfg.Registry.All() {
		if r := u.Row(); r != nil && r.Stage != journal.Stored && r.Plan.Limits.CPUShares == 0 {
			all[b.cfg.Cgroup(string(u.ID))] = sandbox{u.Ref.Namespace, r.Plan.Limits.Weight()}
		}
	}
	return all
}

// reserved is how many of n processors confined sandboxes do not run on.
func reserved(n int) int {
	if n < 2 {
		return n
	}
	return max(1, n/4)
}

// adopt finds the sandboxes that an earlier process has lowered, and may have confined.
func (b *Balancer) adopt() error {
	var failures []error
	for path := range b.running() {
		lowered, err := cgroups.LowestCPU(path)
		failures = append(failures, err)
		if lowered {
			b.lowered[path] = priority{lowest: true, confined: true}
			b.sandboxes.loads[path] = &load{lowered: true, limit: enough}
		}
	}
	return errors.Join(failures...)
}

// sample measures since the last sample, and changes priorities.
func (b *Balancer) sample(ctx context.Context, now time.Time) error {
	idle, err := idleTime()
	if err != nil {
		return err
	}
	if took := now.Sub(b.sampled); !b.sampled.IsZero() && took > 0 {
		part := (idle - b.idleTime).Seconds() / took.Seconds() / float64(runtime.NumCPU())
		b.idle += keep(took) * (part - b.idle)
	}
	b.idleTime, b.sampled = idle, now
	if b.idle >= contended && !b.sandboxes.anyLowered() && !b.namespaces.anyLowered() {
		b.seen = nil
		return nil
	}
	running := b.running()
	used, took, err := b.measure(running, now)
	if err != nil || used == nil {
		return err
	}
	sums := map[string]float64{}
	for path, cores := range used {
		sums[running[path].namespace] += cores
	}
	b.sandboxes.decide(used, b.idle, took)
	b.namespaces.decide(sums, b.idle, took)
	var lowered, others float64
	for path, cores := range used {
		if b.lowers(path, running[path]) {
			lowered += cores
		} else {
			others += cores
		}
	}
	b.confinement.decide(lowered, others, took)
	return b.apply(ctx, running)
}

// lowers reports whether a sandbox shall have the lowest priority.
func (b *Balancer) lowers(path string, s sandbox) bool {
	return b.sandboxes.lowered(path) || b.namespaces.lowered(s.namespace)
}

// apply gives each sandbox the priority that was decided.
func (b *Balancer) apply(ctx context.Context, running map[string]sandbox) error {
	var failures []error
	maps.DeleteFunc(b.lowered, func(path string, _ priority) bool { _, ok := running[path]; return !ok })
	for path, s := range running {
		want, was := priority{lowest: b.lowers(path, s)}, b.lowered[path]
		want.confined = want.lowest && b.confinement.on
		if want == was {
			continue
		}
		err := change(path, s, was, want)
		if cgroups.IsMissing(err) { // not yet, or not any more
			continue
		}
		failures = append(failures, err)
		b.cfg.Log.DebugContext(ctx, "priority of a sandbox changed", "cgroup", path, "lowest", want.lowest, "confined", want.confined, telemetry.Error, err)
		if want.lowest {
			b.lowered[path] = want
		} else {
			delete(b.lowered, path)
		}
	}
	b.cfg.Lowered.Set(float64(len(b.lowered)))
	return errors.Join(failures...)
}

// change writes what differs. A kernel without cpusets confines nothing.
func change(path string, s sandbox, was, want priority) error {
	var failures []error
	if was.lowest != want.lowest {
		failures = append(failures, cgroups.SetLowestCPU(path, want.lowest, s.weight))
	}
	if was.confined != want.confined {
		cpus, err := cgroups.Processors(path)
		if want.confined {
			all := cpus.List()
			cpus = cpuset.New(all[:len(all)-reserved(len(all))]...)
		}
		if err == nil {
			err = cgroups.SetProcessors(path, cpus)
		}
		if !cgroups.IsMissing(err) {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// measure returns the cores that each sandbox has used since the last measurement, or nil if there was none. A cgroup that was made
// again meanwhile has its own priority.
func (b *Balancer) measure(running map[string]sandbox, now time.Time) (used map[string]float64, took time.Duration, err error) {
	seen, before := make(map[string]time.Duration, len(running)), b.seen
	took = now.Sub(b.read)
	used = make(map[string]float64, len(running))
	for path := range running {
		cpu, err := cgroups.ReadCPU(path)
		if cgroups.IsMissing(err) {
			delete(b.lowered, path)
			continue
		}
		if err != nil {
			return nil, 0, err
		}
		seen[path] = cpu
		switch was, ok := before[path]; {
		case !ok: // it was made since
			used[path] = cpu.Seconds() / took.Seconds()
		case cpu < was:
			delete(b.sandboxes.loads, path)
			delete(b.lowered, path)
		default:
			used[path] = (cpu - was).Seconds() / took.Seconds()
		}
	}
	b.seen, b.read = seen, now
	if before == nil {
		return nil, 0, nil
	}
	return used, took, nil
}

// idleTime returns for how long the processors have been idle, summed up. See proc_uptime(5).
func idleTime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0, fmt.Errorf("read idle time: %w", err)
	}
	_, idle, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	d, err := time.ParseDuration(idle + "s")
	if err != nil {
		return 0, fmt.Errorf("read idle time: %w", err)
	}
	return d, nil
}
