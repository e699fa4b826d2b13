package inventory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Audit lists resources of the instance without a sandbox in the journal, one line each; none is expected. Operations
// in progress may be listed.
func (s *Scanner) Audit(ctx context.Context) (left []string, err error) {
	v, err := s.Scan(ctx)
	failures := []error{err}
	namespaces := map[string]bool{}
	for _, r := range v.Resources {
		if r.Kind == kindNetns {
			namespaces[s.Devices.HostLink(r.Name)] = true
		}
	}
	for _, r := range v.Resources {
		switch {
		case !v.Known[r.ID]:
			left = append(left, r.String())
		case r.Kind == kindLink && !namespaces[r.Name]:
			left = append(left, r.String()+" without a network namespace")
		}
	}
	for _, l := range s.Allocator.List() {
		if l.Owner != "" && !v.Known[string(sandbox.IDOf(types.UID(l.Owner)))] {
			left = append(left, fmt.Sprintf("lease %s of %s", l.Address, l.Owner))
		}
	}
	spares, err := s.Devices.Spares(ctx)
	failures = append(failures, err)
	for _, name := range spares[min(len(spares), s.Network.Spares):] {
		left = append(left, "spare network "+name)
	}
	processes, err := s.Processes(v.Known)
	failures = append(failures, err)
	left = append(left, processes...)
	orphans, incomplete, err := s.Checkpoints.Orphans(ctx)
	failures = append(failures, err)
	left = append(left, incomplete...)
	for _, what := range orphans {
		left = append(left, what...)
	}
	slices.Sort(left)
	return left, errors.Join(failures...)
}

// Processes finds the instance's runtime processes of sandboxes that are not known, by the roots on their command
// lines.
func (s *Scanner) Processes(known map[string]bool) (left []string, err error) {
	err = eachCommand(func(pid string, words []string) {
		ours := slices.ContainsFunc(s.RuntimeRoots, func(root string) bool {
			return slices.Contains(words, root) || slices.Contains(words, "--root="+root)
		})
		if ours && !slices.ContainsFunc(words, func(w string) bool { return known[oci.SandboxOf(w)] }) {
			left = append(left, fmt.Sprintf("process %s %s", pid, strings.Join(words, " ")))
		}
	})
	return left, err
}

// HasProcesses reports whether a process has the ID of a sandbox, or of a container in it, on its command line.
func HasProcesses(id string) (found bool, err error) {
	err = eachCommand(func(_ string, words []string) {
		found = found || slices.ContainsFunc(words, func(w string) bool { return oci.SandboxOf(w) == id })
	})
	return found, err
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
