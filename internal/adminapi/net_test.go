package adminapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// fakeLeases behave like a node's with one address in quarantine.
type fakeLeases struct {
	leases  []adminclient.Lease
	repairs []adminclient.Repair
	away    error
}

func (b *fakeLeases) Leases(context.Context) ([]adminclient.Lease, error) { return b.leases, b.away }

func (b *fakeLeases) Subnets(context.Context) ([]adminclient.Subnet, error) {
	return []adminclient.Subnet{{Subnet: netip.MustParsePrefix("10.0.0.0/24"), Current: true, Total: 254, Free: 253, Quarantined: 1}}, b.away
}

func (b *fakeLeases) FreeAddress(_ context.Context, addr netip.Addr) error {
	for i, l := range b.leases {
		if l.Address != addr {
			continue
		}
		if l.State != "quarantined" {
			return fmt.Errorf("free %s: it is %s by %q: %w", addr, l.State, l.Owner, errs.ErrConflict)
		}
		b.leases[i].State = "cooling"
		return nil
	}
	return fmt.Errorf("free %s: it is free: %w", addr, errs.ErrConflict)
}

func (b *fakeLeases) CheckAddresses(context.Context) ([]adminclient.Repair, error) {
	return b.repairs, b.away
}

func (b *fakeLeases) TraceEgress(_ context.Context, req adminclient.TraceRequest) (adminclient.Trace, error) {
	if req.Sandbox != "iaaa0000000000000001" {
		return adminclient.Trace{}, fmt.Errorf("sandbox %s is not on this node: %w", req.Sandbox, errs.ErrNotFound)
	}
	return adminclient.Trace{TraceRequest: req, Verdict: "refused", Rule: "denyOut[0] " + req.Destination}, nil
}

func TestAddresses(t *testing.T) {
	bad, since := netip.MustParseAddr("10.0.0.3"), time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	b := &fakeLeases{leases: []adminclient.Lease{
		{Address: netip.MustParseAddr("10.0.0.2"), State: "held", Owner: "uid", Since: since},
		{Address: bad, State: "quarantined", Since: since, Reason: "in use by another host"},
	}}
	client, _, _ := startWith(t, func(cfg *Config) { cfg.Addresses = b })
	leases, err := client.Leases(t.Context())
	if err != nil || !slices.Equal(leases, b.leases) {
		t.Errorf("leases %+v, %v", leases, err)
	}
	subnets, err := client.Subnets(t.Context())
	if err != nil || len(subnets) != 1 || subnets[0].Free != 253 || subnets[0].Subnet.Bits() != 24 {
		t.Errorf("subnets %+v, %v", subnets, err)
	}
	if err := client.FreeAddress(t.Context(), bad); err != nil || b.leases[1].State != "cooling" {
		t.Errorf("free: %v", err)
	}
	if err := client.FreeAddress(t.Context(), leases[0].Address); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), `held by "uid"`) {
		t.Errorf("free of another's: %v", err)
	}
}

func TestCheckAddresses(t *testing.T) {
	b := &fakeLeases{}
	client, socket, _ := startWith(t, func(cfg *Config) { cfg.Addresses = b })
	if repairs, err := client.CheckAddresses(t.Context()); err != nil || repairs == nil || len(repairs) != 0 {
		t.Errorf("repairs %v, %v; want an empty list", repairs, err)
	}
	b.repairs = []adminclient.Repair{{Kind: adminclient.RepairConflict, Address: netip.MustParseAddr("10.0.0.3"), Detail: "x"}}
	if repairs, err := client.CheckAddresses(t.Context()); err != nil || !slices.Equal(repairs, b.repairs) {
		t.Errorf("repairs %v, %v", repairs, err)
	}
	b.away = errs.Public(errs.ErrUnavailable, "the server is not ready (node)")
	if _, err := client.Leases(t.Context()); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "not ready (node)") {
		t.Errorf("during the boot: %v", err)
	}
	if code := post(t, socket, adminclient.PathCheck, ""); code != http.StatusServiceUnavailable {
		t.Errorf("check during the boot: %d", code)
	}
}

func TestTrace(t *testing.T) {
	b := &fakeLeases{}
	client, socket, _ := startWith(t, func(cfg *Config) { cfg.Egress = b })
	req := adminclient.TraceRequest{Sandbox: "iaaa0000000000000001", Destination: "example.com", Port: 443, Protocol: "tcp"}
	trace, err := client.TraceEgress(t.Context(), req)
	if err != nil || trace.Verdict != "refused" || trace.Rule != "denyOut[0] example.com" || trace.TraceRequest != req {
		t.Errorf("trace %+v, %v", trace, err)
	}
	req.Sandbox = "iother"
	if _, err := client.TraceEgress(t.Context(), req); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("of another: %v", err)
	}
	req.Destination = ""
	if _, err := client.TraceEgress(t.Context(), req); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "destination") {
		t.Errorf("without a destination: %v", err)
	}
	if code := post(t, socket, adminclient.PathTrace, `{"port":65536}`); code != http.StatusBadRequest {
		t.Errorf("a port that cannot be: %d", code)
	}
	if _, err := client.Leases(t.Context()); !errors.Is(err, errs.ErrNotFound) { // a server without a node
		t.Errorf("leases without a node: %v", err)
	}
}

func TestFreeAddressThatIsNone(t *testing.T) {
	b := &fakeLeases{}
	_, socket, _ := startWith(t, func(cfg *Config) { cfg.Addresses = b })
	if code := request(t, socket, http.MethodDelete, adminclient.PathFree+"/nonsense", ""); code != http.StatusBadRequest {
		t.Errorf("answer %d", code)
	}
}

// startWith serves a backend with more parts.
func startWith(t *testing.T, change func(*Config)) (*adminclient.Client, string, func() error) {
	t.Helper()
	b := newBackend()
	cfg := Config{Server: b, Images: b, Build: b, Log: telemetry.Discard()}
	change(&cfg)
	return startConfig(t, cfg)
}
