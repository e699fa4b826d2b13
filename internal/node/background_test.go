package node

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ipam"
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

// noRows is an ipam.Store without rows.
type noRows struct{}

func (noRows) Each(func(ipam.Row) error) error { return nil }
func (noRows) Apply(...ipam.Row) error         { return nil }

// TestAddressesAreReconciledPeriodically runs the service of that name for two intervals.
func TestAddressesAreReconciledPeriodically(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		allocator, err := ipam.Open(ipam.Config{Subnet: netip.MustParsePrefix("10.87.0.0/24"), Store: noRows{}, Log: telemetry.Discard()})
		must(t, err)
		scans := 0
		n := &Node{}
		n.reconciler, err = ipam.NewReconciler(ipam.ReconcilerConfig{Allocator: allocator, Log: telemetry.Discard(), Live: func(context.Context) ([]ipam.InUse, error) {
			scans++
			return nil, nil
		}})
		must(t, err)
		services := n.background()
		i := slices.IndexFunc(services, func(s backgroundService) bool { return s.name == "reconcile of addresses" })
		ctx, cancel := context.WithTimeout(t.Context(), 2*ipam.ReconcileInterval+time.Second)
		defer cancel()
		go services[i].run(ctx)
		<-ctx.Done()
		synctest.Wait()
		if scans != 2 {
			t.Errorf("the addresses in use were read %d times in two intervals", scans)
		}
	})
}
