package bench

import (
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubefakes"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

var (
	rounds = flag.Int("rounds", 5, "how many turns each side has")
	asJSON = flag.Bool("json", false, "report in JSON")
	output = flag.String("output", "", "write the report to this file, not to stdout")
	peer   = flag.String("peer", "", "directory of a controller to compare with: `DIR`/crds/*.yaml and the program DIR/controller, which gets KUBECONFIG")
	args   = flag.String("peer-args", "", "arguments of that program, separated by spaces")
	older  = flag.String("peer-version", "v1beta1", "version of the extension kinds that it serves: v1beta1 or v1alpha1")
	pool   = flag.Int("pool", 200, "how many members the pool has")
	claims = flag.Int("claims", 100, "how many claims are made 20 at once; half as many are made one at a time")
	// See BenchmarkScale.
	sandboxes = flag.String("sandboxes", "", "measure ours with these numbers of running sandboxes instead, such as 100,10000: `LIST`")
	replicas  = flag.Int("replicas", 3, "how many replicas that has")
)

// side is one of those that are compared.
type side struct {
	name string
	crds string
	// version is that of the extension kinds.
	version string
	// start starts the controllers.
	start func(b *testing.B, c *kubecluster.Cluster)
	// e2b is whether it serves the E2B API.
	e2b bool
}

// BenchmarkClaims measures the sides in turns and reports medians. Speed is no error.
func BenchmarkClaims(b *testing.B) {
	if *sandboxes != "" {
		b.Skip("SKIPPED: -sandboxes measures something else")
	}
	sides := []side{barchan(b)}
	if *peer != "" {
		sides = append(sides, other(b, *peer))
	}
	names := make([]string, len(sides))
	for i, s := range sides {
		names[i] = s.name
	}
	r := newReport(claimFigures, fmt.Sprintf("a pool of %d; %d claims one at a time, %d claims %d at once", *pool, *claims/2, *claims, atOnce), names...)
	for n := range *rounds {
		for i := range sides {
			s := sides[(n+i)%len(sides)] // neither side is always the first
			if !b.Run(s.name, func(b *testing.B) { r.add(s.name, measure(b, s)) }) {
				return
			}
		}
	}
	r.Ended = time.Now()
	must(b, r.writeTo(*output, *asJSON))
}

// barchan is the side that is ours.
func barchan(b *testing.B) side {
	bin := kubeinstall.Build(b)
	return side{name: "Barchan", crds: kubeinstall.CRDs(b), version: "v1beta1", e2b: true, start: func(b *testing.B, c *kubecluster.Cluster) {
		installed := kubeinstall.New(b, c, bin)
		installed.StartController("barchan.test/agent:1")
		installed.StartReplica()
	}}
}

// other is a controller of the same kinds. It runs with the rights of an administrator.
func other(b *testing.B, dir string) side {
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(kubeinstall.Root(b), dir)
	}
	return side{name: filepath.Base(dir), crds: filepath.Join(dir, "crds"), version: *older, start: func(b *testing.B, c *kubecluster.Cluster) {
		c.Run(b, filepath.Join(dir, "controller"), strings.Fields(*args)...)
	}}
}

// measure has one side's turn, in a cluster of its own.
func measure(b *testing.B, s side) turn {
	c := kubecluster.Start(b, kubecluster.Config{Install: func(cfg *rest.Config) { kubeinstall.InstallCRDs(b, cfg, s.crds) }})
	kubefakes.Play(b, c)
	s.start(b, c)
	l := newLoad(b, c, s.version)
	l.warmUp()
	t := turn{Figures: map[string]float64{}}
	t.Figures[poolFilled] = l.fill(*pool)

	one, err := l.claim(*claims/2, 1)
	must(b, err)
	t.Figures[claimP50] = percentile(one.millis, 0.5)
	l.settle()

	before, read, used := l.writes(), l.requests(readVerbs), processorTimes(b)
	many, err := l.claim(*claims, atOnce)
	must(b, err)
	t.Processor = processorTimes(b).since(used).per(*claims)
	l.settle()
	t.Writes, t.Reads = l.writes().since(before).per(*claims), l.requests(readVerbs).since(read).per(*claims)
	t.Figures[claimP99] = percentile(many.millis, 0.99)
	t.Figures[claimRate] = many.rate()
	t.Figures[claimWrites] = t.Writes.total()

	if s.e2b {
		created, err := l.e2b(*claims/2, 1, kubeinstall.APIAddress)
		must(b, err)
		t.Figures[e2bP50] = percentile(created.millis, 0.5)
	}
	return t
}
