package bench

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubefakes"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

// Names of figures. Memory is in MiB.
const (
	sandboxesFilled = "running sandboxes filled"
	scalePoolFilled = "warm pool filled beside them"
	leaderRSS       = "leader, RSS"
	leaderPSS       = "leader, PSS"
	leaderHeap      = "leader, live heap"
	leaderPeak      = "leader, greatest RSS since its start"
	replicaRSS      = "largest replica, RSS"
	replicaPSS      = "largest replica, PSS"
	replicaHeap     = "largest replica, live heap"
	replicaPeak     = "largest replica, greatest RSS since its start"
	scaleE2BP50     = "E2B create by all replicas, 20 at once, p50"
	scaleE2BP99     = "E2B create by all replicas, 20 at once, p99"
	scaleE2BRate    = "E2B creates a second, 20 at once"
	mixedE2BP99     = "E2B create, 10 at once beside 10 SandboxClaims, p99"
	scaleClaimP50   = "SandboxClaim to Ready, 10 at once beside 10 E2B creates, p50"
	scaleClaimP99   = "SandboxClaim to Ready, 10 at once beside 10 E2B creates, p99"
	scaleWrites     = "API writes per claim with refill, E2B creates and SandboxClaims"
	conflicts       = "conflicts per claim, E2B creates and SandboxClaims"
	freshReplica    = "start of a replica until it is ready"
	freshReplicaMax = "start of a replica, greatest RSS"
	freshLeader     = "start of a leader until it is ready"
	freshLeaderMax  = "start of a leader, greatest RSS"
	freshLeads      = "start of a leader until a SandboxClaim is ready"
)

// conflictsBy is a figure: conflicts per E2B create by a number of replicas.
func conflictsBy(replicas int) string {
	return fmt.Sprintf("conflicts per E2B create, %d at once by %d replicas", atOnce, replicas)
}

// scaleFigures are those of BenchmarkScale. Times are compared with those of the fewest sandboxes.
func scaleFigures(replicas int) []figure {
	few := &bar{Value: 0.02}
	list := []figure{
		{name: sandboxesFilled, unit: "s"},
		{name: scalePoolFilled, unit: "s", over: scalePoolFilled},
		{name: leaderRSS, unit: "MiB", bar: &bar{Value: 400}},
		{name: leaderPSS, unit: "MiB"},
		{name: leaderHeap, unit: "MiB"},
		{name: leaderPeak, unit: "MiB"},
		{name: replicaRSS, unit: "MiB", bar: &bar{Value: 300}},
		{name: replicaPSS, unit: "MiB"},
		{name: replicaHeap, unit: "MiB"},
		{name: replicaPeak, unit: "MiB"},
		{name: scaleE2BP50, unit: "ms", over: scaleE2BP50},
		{name: scaleE2BP99, unit: "ms", over: scaleE2BP99, bar: &bar{Value: 1.5}},
		{name: scaleE2BRate, unit: "/s", over: scaleE2BRate},
		{name: mixedE2BP99, unit: "ms", over: mixedE2BP99},
		{name: scaleClaimP50, unit: "ms", over: scaleClaimP50},
		{name: scaleClaimP99, unit: "ms", over: scaleClaimP99, bar: &bar{Value: 1.5}},
		{name: scaleWrites, over: scaleWrites},
		{name: conflicts, bar: few},
	}
	for k := range replicas {
		list = append(list, figure{name: conflictsBy(k + 1), bar: few})
	}
	return append(list,
		figure{name: freshReplica, unit: "s"}, figure{name: freshReplicaMax, unit: "MiB"},
		figure{name: freshLeader, unit: "s"}, figure{name: freshLeaderMax, unit: "MiB"}, figure{name: freshLeads, unit: "s"})
}

// BenchmarkScale measures ours beside numbers of running sandboxes, each in a cluster of its own. -rounds is how often claims
// are measured there.
func BenchmarkScale(b *testing.B) {
	if *sandboxes == "" {
		b.Skip("SKIPPED: -sandboxes selects it")
	}
	var sizes []int
	for text := range strings.SplitSeq(*sandboxes, ",") {
		n, err := strconv.Atoi(text)
		must(b, err)
		sizes = append(sizes, n)
	}
	slices.SortFunc(sizes, func(x, y int) int { return y - x }) // the most are judged
	names := make([]string, len(sizes))
	for i, n := range sizes {
		names[i] = fmt.Sprintf("%d sandboxes", n)
	}
	setup := fmt.Sprintf("%d replicas; a pool of %d; %d times %d claims of each kind", *replicas, *pool, *rounds, *claims)
	r := newReport(scaleFigures(*replicas), setup, names...)
	bin := kubeinstall.Build(b)
	for i, n := range slices.Backward(sizes) {
		if !b.Run(names[i], func(b *testing.B) { r.add(names[i], measureScale(b, bin, n)) }) {
			return
		}
	}
	r.Ended = time.Now()
	must(b, r.writeTo(*output, *asJSON))
}

// scale is a cluster with one controller, some replicas, and running sandboxes.
type scale struct {
	*load
	turn
	ours       *kubeinstall.Barchan
	controller *kubeinstall.Process
	replicas   []*kubeinstall.Process
}

func measureScale(b *testing.B, bin string, running int) turn {
	c := kubecluster.Start(b, kubecluster.Config{Install: func(cfg *rest.Config) { kubeinstall.InstallCRDs(b, cfg, kubeinstall.CRDs(b)) }})
	kubefakes.Play(b, c)
	s := &scale{load: newLoad(b, c, "v1beta1"), turn: turn{Figures: map[string]float64{}}, ours: kubeinstall.New(b, c, bin)}
	s.container = container()
	s.startController()
	for i := range *replicas {
		s.replicas = append(s.replicas, s.startReplica(i))
	}
	s.warmUp()
	s.fillSandboxes(running)
	s.Figures[scalePoolFilled] = s.resize(*pool)
	s.memory()
	s.claims()
	s.restart()
	return s.turn
}

// container is one of usual size.
func container() map[string]any {
	return map[string]any{
		"name": "main", "image": "registry.example.com/team/code-interpreter:2026-11-01", "command": []any{"/usr/local/bin/start", "--wait"},
		"env":             []any{map[string]any{"name": "LANG", "value": "C.UTF-8"}, map[string]any{"name": "PYTHONUNBUFFERED", "value": "1"}, map[string]any{"name": "HOME", "value": "/home/user"}},
		"ports":           []any{map[string]any{"name": "http", "containerPort": int64(8080)}},
		"resources":       map[string]any{"requests": map[string]any{"cpu": "250m", "memory": "512Mi"}, "limits": map[string]any{"cpu": "2", "memory": "1Gi"}},
		"securityContext": map[string]any{"runAsUser": int64(1000), "allowPrivilegeEscalation": false, "capabilities": map[string]any{"drop": []any{"ALL"}}},
		"readinessProbe":  map[string]any{"exec": map[string]any{"command": []any{"/bin/true"}}, "periodSeconds": int64(5)},
	}
}

func (s *scale) startController() {
	s.controller = s.ours.StartController("barchan.test/agent:1")
}

func (s *scale) startReplica(i int) *kubeinstall.Process {
	return s.ours.Replica(fmt.Sprintf("replica-%d", i), fmt.Sprintf("%s:%d", kubecluster.NodeIP, 7701+i))
}

func (s *scale) addresses(n int) []string {
	all := make([]string, n)
	for i := range n {
		all[i] = s.replicas[i].Address
	}
	return all
}

// fillSandboxes has a number of sandboxes run: half of them E2B's, half of them those of SandboxClaims, on a pool without members.
func (s *scale) fillSandboxes(n int) {
	s.fill(0)
	began := time.Now()
	s.both(n/2, n-n/2, 32)
	s.Figures[sandboxesFilled] = time.Since(began).Seconds()
	s.settle()
	s.Logf("%d sandboxes run after %.0f s", n, s.Figures[sandboxesFilled])
}

// both makes E2B creates by all replicas and SandboxClaims at the same time, from as many clients each.
func (s *scale) both(creates, claims, clients int) (created, claimed claimed) {
	s.Helper()
	var group errgroup.Group
	group.Go(func() (err error) {
		created, err = s.e2b(creates, clients, s.addresses(len(s.replicas))...)
		return err
	})
	group.Go(func() (err error) { claimed, err = s.claim(claims, clients); return err })
	must(s, group.Wait())
	return created, claimed
}

// resize changes the pool's size and returns the seconds until all of its members are ready.
func (s *scale) resize(size int) float64 {
	began := time.Now()
	s.await("sandboxwarmpools", full(size), func() error {
		began = time.Now()
		_, err := s.kind("sandboxwarmpools").Patch(s.Context(), poolName, types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, size), metav1.PatchOptions{})
		return err
	})
	took := time.Since(began).Seconds()
	s.settle()
	return took
}

// claims claims by one replica, by two, and so on, and then by all together with SandboxClaims. What is claimed is removed
// before the next time.
func (s *scale) claims() {
	s.Writes = counts{}
	var byAll, mixedE2B, mixedClaims claimed
	lost := map[string]float64{}
	for range *rounds {
		for k := range s.replicas {
			before := s.writes()
			c, err := s.e2b(*claims, atOnce, s.addresses(k+1)...)
			must(s, err)
			w := s.cleared(before, c)
			lost[conflictsBy(k+1)] += w.refused()
			s.Logf("%d creates by %d replicas, %v in all, p99 %.0f ms: %v", len(c.millis), k+1, c.took, percentile(c.millis, 0.99), w)
			if k+1 == len(s.replicas) {
				byAll.add(c)
			}
		}
		before := s.writes()
		created, claimed := s.both(*claims/2, *claims-*claims/2, atOnce/2)
		w := s.cleared(before, created, claimed)
		lost[conflicts] += w.refused()
		for key, n := range w {
			s.Writes[key] += n
		}
		mixedE2B.add(created)
		mixedClaims.add(claimed)
	}
	all := *rounds * *claims
	for name, n := range lost {
		s.Figures[name] = n / float64(all)
	}
	s.Writes = s.Writes.per(all)
	s.Figures[scaleWrites] = s.Writes.total()
	s.Figures[scaleE2BP50], s.Figures[scaleE2BP99] = percentile(byAll.millis, 0.5), percentile(byAll.millis, 0.99)
	s.Figures[scaleE2BRate] = byAll.rate()
	s.Figures[mixedE2BP99] = percentile(mixedE2B.millis, 0.99)
	s.Figures[scaleClaimP50], s.Figures[scaleClaimP99] = percentile(mixedClaims.millis, 0.5), percentile(mixedClaims.millis, 0.99)
}

// cleared returns the writes since some, refills included, and removes what was claimed.
func (s *scale) cleared(before counts, all ...claimed) counts {
	s.Helper()
	s.settle()
	w := s.writes().since(before)
	s.remove(all...)
	s.settle()
	return w
}

// restart replaces a replica and the controller, which have all to list again.
func (s *scale) restart() {
	last := len(s.replicas) - 1
	s.replicas[last].Stop()
	s.replicas[last] = s.startReplica(last)
	s.Figures[freshReplica], s.Figures[freshReplicaMax] = s.replicas[last].ReadyAt.Sub(s.replicas[last].Started).Seconds(), s.process(s.replicas[last]).peak
	s.controller.Stop()
	s.startController()
	s.Figures[freshLeader] = s.controller.ReadyAt.Sub(s.controller.Started).Seconds()
	_, err := s.claim(1, 1)
	must(s, err)
	s.Figures[freshLeads] = time.Since(s.controller.Started).Seconds()
	s.settle()
	s.Figures[freshLeaderMax] = s.process(s.controller).peak
}

// memory measures the processes at rest: nothing has been written for a while, Go has collected the garbage of each since
// then, as it does every two minutes, and returns no more memory to the kernel.
func (s *scale) memory() {
	began := time.Now()
	tick := time.NewTicker(quiet)
	defer tick.Stop()
	for _, r := range append([]*kubeinstall.Process{s.controller}, s.replicas...) {
		p := s.process(r)
		for last := p.rss; p.collected.Before(began) || p.rss < last-1; p = s.process(r) {
			last = p.rss
			<-tick.C
		}
		s.Logf("%s: RSS %.0f, PSS %.0f, live heap %.0f, greatest RSS %.0f MiB", r.Name, p.rss, p.pss, p.heap, p.peak)
		rss, pss, heap, peak := replicaRSS, replicaPSS, replicaHeap, replicaPeak
		if r == s.controller {
			rss, pss, heap, peak = leaderRSS, leaderPSS, leaderHeap, leaderPeak
		}
		for name, v := range map[string]float64{rss: p.rss, pss: p.pss, heap: p.heap, peak: p.peak} {
			s.Figures[name] = max(s.Figures[name], v)
		}
	}
}

// process is the state of a process; sizes are in MiB.
type process struct {
	rss, pss, peak, heap float64
	collected            time.Time // the last end of a garbage collection
}

// process reads /proc and the metrics of a role.
func (s *scale) process(r *kubeinstall.Process) (p process) {
	s.Helper()
	for _, f := range []struct {
		file, field string
		into        *float64
	}{{"smaps_rollup", "Rss", &p.rss}, {"smaps_rollup", "Pss", &p.pss}, {"status", "VmHWM", &p.peak}} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", r.PID(), f.file))
		must(s, err)
		for line := range bytes.Lines(text) {
			if rest, ok := bytes.CutPrefix(line, []byte(f.field+":")); ok {
				kib, err := strconv.ParseFloat(string(bytes.Fields(rest)[0]), 64)
				must(s, err)
				*f.into = kib / 1024
			}
		}
	}
	text, err := r.Get(s.Context(), "/metrics")
	must(s, err)
	families, err := parseMetrics(text)
	must(s, err)
	gauge := func(name string) float64 { return families[name].GetMetric()[0].GetGauge().GetValue() }
	p.heap = gauge("go_memstats_heap_alloc_bytes") / (1 << 20)
	p.collected = time.UnixMicro(int64(gauge("go_memstats_last_gc_time_seconds") * 1e6))
	return p
}
