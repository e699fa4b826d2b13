package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Audit lists what of the instance is on the machine without a sandbox that the node knows, one
// line each: it should be nothing. What is being made or removed just now may be listed.
func (n *Node) Audit(ctx context.Context) (left []string, err error) {
	v, err := n.scanHost(ctx)
	failures := []error{err}
	namespaces := map[string]bool{}
	for _, t := range v.things {
		if t.kind == kindNetns {
			namespaces[n.network.HostLink(t.name)] = true
		}
	}
	for _, t := range v.things {
		switch {
		case !v.known[t.id]:
			left = append(left, t.String())
		case t.kind == kindLink && !namespaces[t.name]:
			left = append(left, t.String()+" without a network namespace")
		}
	}
	for _, l := range n.allocator.List() {
		if l.Owner != "" && !v.known[string(sandbox.IDOf(types.UID(l.Owner)))] {
			left = append(left, fmt.Sprintf("lease %s of %s", l.Address, l.Owner))
		}
	}
	rules, err := n.network.EgressRules(ctx)
	failures = append(failures, err)
	for _, id := range rules {
		if !v.known[id] {
			left = append(left, "egress rules of "+id)
		}
	}
	spares, err := n.network.Spares(ctx)
	failures = append(failures, err)
	for _, name := range spares[min(len(spares), n.cfg.Network.Spares):] {
		left = append(left, "spare network "+name)
	}
	processes, err := n.processes(v.known)
	failures = append(failures, err)
	left = append(left, processes...)
	stray, lame, err := n.checkpoints.Stray(ctx)
	failures = append(failures, err)
	left = append(left, lame...)
	for _, what := range stray {
		left = append(left, what...)
	}
	slices.Sort(left)
	return left, errors.Join(failures...)
}

func entries(dir string) (names []string, err error) {
	found, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	for _, e := range found {
		names = append(names, e.Name())
	}
	return names, nil
}

// mountsBelow names the first path elements below a directory that are or contain mounts.
func mountsBelow(dir string) (names []string, err error) {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		if rest, ok := strings.CutPrefix(fields[1], dir+"/"); ok {
			first, _, _ := strings.Cut(rest, "/")
			names = append(names, first)
		}
	}
	return names, nil
}

// processes finds the runtimes' processes of this instance by their roots on the command line.
func (n *Node) processes(known map[string]bool) (left []string, err error) {
	err = eachCommand(func(pid string, words []string) {
		ours := slices.ContainsFunc(n.cfg.Runtimes, func(r oci.Config) bool {
			return slices.Contains(words, r.Root) || slices.Contains(words, "--root="+r.Root)
		})
		if ours && !slices.ContainsFunc(words, func(w string) bool { return known[w] }) {
			left = append(left, fmt.Sprintf("process %s %s", pid, strings.Join(words, " ")))
		}
	})
	return left, err
}

// eachCommand visits the command lines of the machine's processes.
func eachCommand(visit func(pid string, words []string)) error {
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, file := range found {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it ended
		}
		visit(filepath.Base(filepath.Dir(file)), strings.Split(strings.TrimRight(string(b), "\x00"), "\x00"))
	}
	return nil
}
