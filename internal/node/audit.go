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

	"github.com/barchan-dev/barchan/internal/ipam"
	"github.com/barchan-dev/barchan/internal/oci"
)

// Audit lists what of the instance is on the machine without a sandbox that the node knows,
// one line each: it should be nothing. What is being made or removed just now may be listed.
func (n *Node) Audit(ctx context.Context) (left []string, err error) {
	known := map[string]bool{}
	owners := map[string]bool{}
	links := map[string]bool{}
	for _, u := range n.allUnits() {
		if u.current() != nil {
			known[string(u.id)], owners[string(u.ref.UID)] = true, true
			links[n.network.HostLink(string(u.id))] = true
		}
	}
	var failures []error
	look := func(kind string, known map[string]bool, names []string, err error) {
		failures = append(failures, err)
		for _, name := range names {
			if !known[name] {
				left = append(left, kind+" "+name)
			}
		}
	}
	namespaces, err := n.network.List(ctx)
	look("network namespace", known, namespaces, err)
	ports, err := n.network.Links(ctx)
	look("link", links, ports, err)
	snapshots, err := n.cfg.Containerd.Snapshots(ctx)
	look("snapshot", known, snapshots, err)
	records, err := n.cfg.Containerd.Records(ctx)
	failures = append(failures, err)
	for _, r := range records {
		look("record", known, []string{r.ID}, nil)
	}
	for class, r := range n.runtimes {
		ids, err := r.List()
		look(string(class)+" container", known, ids, err)
	}
	for _, dir := range []string{"sandboxes", "claims"} {
		names, err := entries(filepath.Join(n.cfg.DataDir, dir))
		look("directory "+dir, known, names, err)
	}
	images, err := oci.ListImages(n.cfg.MemoryDir)
	look("memory", known, images, err)
	cgroups, err := oci.Cgroups(n.cfg.CgroupParent)
	look("cgroup", known, cgroups, err)
	mounts, err := mountsBelow(filepath.Join(n.cfg.DataDir, "sandboxes"))
	look("mount", known, mounts, err)
	for _, l := range n.books.List() {
		if l.State == ipam.Reserved || l.State == ipam.Held {
			look("lease "+l.Address.String()+" of", owners, []string{l.Owner}, nil)
		}
	}
	processes, err := n.processes(known)
	failures = append(failures, err)
	left = append(left, processes...)
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
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, file := range found {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it ended
		}
		words := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
		ours := slices.ContainsFunc(n.cfg.Runtimes, func(r oci.Config) bool {
			return slices.Contains(words, r.Root) || slices.Contains(words, "--root="+r.Root)
		})
		if ours && !slices.ContainsFunc(words, func(w string) bool { return known[w] }) {
			left = append(left, fmt.Sprintf("process %s %s", filepath.Base(filepath.Dir(file)), strings.Join(words, " ")))
		}
	}
	return left, nil
}
