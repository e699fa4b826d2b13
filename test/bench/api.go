package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// apiBenchmark is the package whose benchmark of the API server runs beside a bare etcd.
const apiBenchmark = "./internal/control/apiserver"

// apiFigures says how to call the benchmark's cases, and which case is the floor of each.
var apiFigures = []struct{ name, title, floor, bare string }{
	{"get", "read a sandbox", "floor/get", "bare etcd read"},
	{"create/1", "create a sandbox object", "floor/create/1", "bare etcd transaction"},
	{"create/16", "create, 16 at once", "floor/create/16", "the same of bare etcd"},
	{"update/1", "update a sandbox object", "floor/create/1", "bare etcd transaction"},
	{"update/16", "update, 16 at once", "floor/create/16", "the same of bare etcd"},
	{"update/direct/1", "update as claims do it", "floor/create/1", "bare etcd transaction"},
	{"update/direct/16", "update as claims do it, 16 at once", "floor/create/16", "the same of bare etcd"},
	{"status", "update a status", "floor/create/1", "bare etcd transaction"},
	{"write-to-watch", "update, until a watch has it", "floor/create/1", "bare etcd transaction"},
}

// result is one case of a Go benchmark.
type result struct {
	n       int
	metrics map[string]float64 // by unit
}

// measureAPI runs the API server's own benchmark, which has its floor with it: a transaction
// of a bare etcd on the same disk.
func measureAPI(ctx context.Context, b *bench) error {
	found, err := b.benchmarks(ctx, apiBenchmark, "BenchmarkAPI", b.rounds(2000))
	if err != nil {
		return err
	}
	for _, f := range apiFigures {
		r, ok := found[f.name]
		bare, alsoOK := found[f.floor]
		if !ok || !alsoOK {
			return fmt.Errorf("the benchmark did not print both %s and %s", f.name, f.floor)
		}
		p99 := r.metrics["p99-µs"] / 1000
		b.report.Figures = append(b.report.Figures, (&figure{
			Group: "api", Name: f.title, Unit: "ms", Median: r.metrics["p50-µs"] / 1000, P99: &p99, N: r.n,
		}).over(f.bare, bare.metrics["p50-µs"]/1000))
	}
	return nil
}

// benchmarks runs a Go benchmark of a package, on the same disk as the server's data, and returns
// its cases by what follows its own name.
func (b *bench) benchmarks(ctx context.Context, pkg, name string, n int) (map[string]result, error) {
	exact := "^" + strings.ReplaceAll(name, "/", "$/^") + "$"
	cmd := exec.CommandContext(ctx, "go", "test", "-run=^$", "-bench="+exact, fmt.Sprintf("-benchtime=%dx", n), pkg)
	cmd.Env = append(os.Environ(), "TMPDIR="+b.server.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the test is a child of the command, and ends with it
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("go test -bench %s: %w\n%s", name, err, out.String())
	}
	top, _, _ := strings.Cut(name, "/")
	return parseBenchmark(out.String(), top+"/"), nil
}

// hasSource reports whether the working directory is the source tree, and Go is there.
func hasSource() bool {
	_, missing := exec.LookPath("go")
	_, err := os.Stat(filepath.Join("test", "bench", "api.go"))
	return missing == nil && err == nil
}

// parseBenchmark reads lines such as "BenchmarkAPI/get-2  2000  50 ns/op  48 p50-µs".
func parseBenchmark(out, prefix string) map[string]result {
	found := map[string]result{}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[0], prefix) {
			continue
		}
		n, err := strconv.Atoi(fields[1])
		if err != nil {
			continue
		}
		name := strings.TrimPrefix(fields[0], prefix)
		if i := strings.LastIndexByte(name, '-'); i > 0 { // the number of CPUs, left out where it is 1
			if _, err := strconv.Atoi(name[i+1:]); err == nil {
				name = name[:i]
			}
		}
		r := result{n: n, metrics: map[string]float64{}}
		for i := 2; i+1 < len(fields); i += 2 {
			if v, err := strconv.ParseFloat(fields[i], 64); err == nil {
				r.metrics[fields[i+1]] = v
			}
		}
		found[name] = r
	}
	return found
}
