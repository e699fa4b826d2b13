package gobench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Case is one case of a Go benchmark.
type Case struct {
	N       int
	Metrics map[string]float64 // by unit
}

// P50 returns the median, in milliseconds.
func (c Case) P50() float64 { return c.Metrics["p50-µs"] / 1000 }

// P99 returns what 99 of a hundred keep to, in milliseconds.
func (c Case) P99() float64 { return c.Metrics["p99-µs"] / 1000 }

// Add puts the times of a case into a report.
func (c Case) Add(to *report.Report, group, name string) *report.Figure {
	f, p99 := to.One(group, name, "ms", c.P50()), c.P99()
	f.P99, f.N = &p99, c.N
	return f
}

// Run runs a Go benchmark of a package, on the same disk as the server's data, and returns its cases by what follows its own
// name. That one of the wanted ones is missing is an error.
func Run(ctx context.Context, b *harness.Bench, pkg, name string, n int, wanted ...string) (map[string]Case, error) {
	exact := "^" + strings.ReplaceAll(name, "/", "$/^") + "$"
	cmd := exec.CommandContext(ctx, "go", "test", "-run=^$", "-bench="+exact, fmt.Sprintf("-benchtime=%dx", n), pkg)
	cmd.Env = append(os.Environ(), "TMPDIR="+b.Server.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the test is a child of the command, and ends with it
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("go test -bench %s: %w\n%s", name, err, out.String())
	}
	top, _, _ := strings.Cut(name, "/")
	found := parse(out.String(), top+"/")
	for _, w := range wanted {
		if _, ok := found[w]; !ok {
			return nil, fmt.Errorf("the benchmark of %s did not print %s", pkg, w)
		}
	}
	return found, nil
}

// HasSource reports whether the working directory is the source tree, and Go is there.
func HasSource() bool {
	_, missing := exec.LookPath("go")
	_, err := os.Stat(apiServer)
	return missing == nil && err == nil
}

// parse reads lines such as "BenchmarkAPI/get-2  2000  50 ns/op  48 p50-µs".
func parse(out, prefix string) map[string]Case {
	found := map[string]Case{}
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
		c := Case{N: n, Metrics: map[string]float64{}}
		for i := 2; i+1 < len(fields); i += 2 {
			if v, err := strconv.ParseFloat(fields[i], 64); err == nil {
				c.Metrics[fields[i+1]] = v
			}
		}
		found[name] = c
	}
	return found
}
