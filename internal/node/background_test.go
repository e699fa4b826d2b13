package node

import (
	"slices"
	"testing"
)

// TestBackground lists what Run starts: a service that is missing fails no other test in this package quickly.
func TestBackground(t *testing.T) {
	var names []string
	for _, s := range (&Node{}).background() {
		names = append(names, s.name)
		if s.run == nil {
			t.Errorf("%s does nothing", s.name)
		}
	}
	want := []string{"changes", "spare disks", "room for disks", "sweep", "sweep of builds", "reconcile of addresses", "network", "firewall", "processor shares", "builds of running sandboxes", "resolver"}
	if !slices.Equal(names, want) {
		t.Errorf("Run starts %q, want %q", names, want)
	}
}
