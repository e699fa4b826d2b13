// Package inventory reads which resources of the instance's sandboxes are on the host, and compares them with the
// journal and the lease table. It changes nothing and removes nothing: its caller decides what an orphan is.
//
// It has no locks of its own. A source that cannot be read makes the result an error, never a shorter list.
package inventory

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/memstore"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Kinds of resources.
const (
	KindContainer = "container"
	KindClaims    = "volume claims"
	KindCgroup    = "cgroup"

	kindNetns    = "network namespace"
	kindLink     = "link"
	kindRules    = "egress rules"
	kindSnapshot = "snapshot"
	kindRecord   = "record"
	kindDir      = "directory"
	kindMemory   = "memory"
	kindMount    = "mount"
)

// Scanner reads the host through the owners of its parts. All fields are required.
type Scanner struct {
	DataDir, CgroupParent string
	Memory                *memstore.Store
	// RuntimeRoots are the state directories of the runtimes.
	RuntimeRoots []string
	// Network has the IPv6 prefix and the number of spare networks.
	Network     netdev.Config
	Containerd  *ctrd.Client
	Devices     *netdev.Network
	Runtimes    *programs.Runtimes
	Handles     *registry.Registry
	Journal     *journal.Journal
	Allocator   *ipam.Allocator
	Checkpoints *checkpoint.Store
}

// Resource is a resource of the host; ID is its sandbox's, empty if unknown.
type Resource struct{ Kind, Name, ID string }

func (r Resource) String() string { return r.Kind + " " + r.Name }

// Inventory is the result of one complete scan.
type Inventory struct {
	Resources  []Resource
	Containers map[string]ctrd.Container
	// Known are the IDs of sandboxes with a journal row before or after the scan.
	Known map[string]bool
	ports map[string]string // sandbox ID by host link
}

// Scan finds all resources that carry the instance's name. After an error the caller must decide nothing by the
// result.
func (s *Scanner) Scan(ctx context.Context) (Inventory, error) {
	v := Inventory{Containers: map[string]ctrd.Container{}, Known: map[string]bool{}, ports: map[string]string{}}
	s.addKnown(&v)
	var failures []error
	add := func(kind string, names []string, err error) {
		failures = append(failures, err)
		for _, name := range names {
			v.Resources = append(v.Resources, Resource{Kind: kind, Name: name, ID: name})
		}
	}
	namespaces, err := s.Devices.List(ctx)
	add(kindNetns, namespaces, err)
	for _, id := range namespaces {
		v.ports[s.Devices.HostLink(id)] = id
	}
	links, err := s.Devices.Links(ctx)
	failures = append(failures, err)
	rules, err := s.Devices.EgressRules(ctx)
	add(kindRules, rules, err)
	snapshots, err := s.Containerd.Snapshots(ctx)
	failures = append(failures, err)
	for _, key := range snapshots {
		id, _ := ctrd.SandboxOf(key)
		v.Resources = append(v.Resources, Resource{Kind: kindSnapshot, Name: key, ID: id})
	}
	records, err := s.Containerd.Records(ctx)
	add(kindRecord, nil, err)
	for _, r := range records {
		v.Containers[r.ID] = r
		add(kindRecord, []string{r.ID}, nil)
	}
	for _, r := range s.Runtimes.All() {
		ids, err := r.List()
		add(KindContainer, ids, err)
	}
	dirs, err := Entries(filepath.Join(s.DataDir, "sandboxes"))
	add(kindDir, dirs, err)
	claims, err := Entries(filepath.Join(s.DataDir, "claims"))
	add(KindClaims, claims, err)
	for _, dir := range s.Memory.SandboxDirs() {
		images, err := memimage.List(dir)
		add(kindMemory, images, err)
	}
	groups, err := cgroups.List(s.CgroupParent)
	add(KindCgroup, groups, err)
	mounts, err := s.Mounts()
	add(kindMount, mounts, err)
	s.addKnown(&v) // sandboxes that were begun during the scan
	for _, name := range links {
		v.Resources = append(v.Resources, Resource{Kind: kindLink, Name: name, ID: v.ports[name]})
	}
	return v, errors.Join(failures...)
}

// addKnown adds the sandboxes of the journal, and the links of those that have a lease.
func (s *Scanner) addKnown(v *Inventory) {
	for _, u := range s.Handles.All() {
		if u.Row() != nil {
			v.Known[string(u.ID)] = true
		}
		v.ports[s.Devices.HostLink(string(u.ID))] = string(u.ID)
	}
	for id := range s.Handles.UnreadIDs() {
		v.Known[id] = true
		v.ports[s.Devices.HostLink(id)] = id
	}
	for _, l := range s.Allocator.List() {
		id := string(sandbox.IDOf(types.UID(l.Owner)))
		v.ports[s.Devices.HostLink(id)] = id
	}
}

// Leftovers are the resources without a journal row, by the sandbox's ID.
func (v *Inventory) Leftovers() map[string][]Resource {
	left := map[string][]Resource{}
	for _, r := range v.Resources {
		if !v.Known[r.ID] {
			left[r.ID] = append(left[r.ID], r)
		}
	}
	return left
}

// Entries are the names in a directory, none if it does not exist.
func Entries(dir string) (names []string, err error) {
	found, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	for _, e := range found {
		names = append(names, e.Name())
	}
	return names, nil
}

// Mounts names the sandboxes' directories that are or contain mounts.
func (s *Scanner) Mounts() (names []string, err error) {
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		if rest, ok := strings.CutPrefix(fields[1], filepath.Join(s.DataDir, "sandboxes")+"/"); ok {
			first, _, _ := strings.Cut(rest, "/")
			names = append(names, first)
		}
	}
	return names, nil
}
