package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// network is the admin API's addresses and egress.
type network struct{ *server }

func (n network) Leases(context.Context) ([]adminclient.Lease, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.leases), nil
}

func (n network) Subnets(context.Context) ([]adminclient.Subnet, error) {
	return []adminclient.Subnet{
		{Subnet: netip.MustParsePrefix("10.87.0.0/16"), Subnet6: netip.MustParsePrefix("fd00::/64"), Current: true, Total: 65534, Excluded: 1, Free: 65530, Held: 1, Cooling: 1, Quarantined: 1},
		{Subnet: netip.MustParsePrefix("10.1.0.0/24"), Held: 2},
	}, nil
}

func (n network) FreeAddress(_ context.Context, addr netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, l := range n.leases {
		if l.Address == addr && l.State == "quarantined" {
			n.leases = slices.Delete(n.leases, i, i+1)
			return nil
		} else if l.Address == addr {
			return fmt.Errorf("free %s: it is %s by %q: %w", addr, l.State, l.Owner, errs.ErrConflict)
		}
	}
	return fmt.Errorf("free %s: it is free: %w", addr, errs.ErrConflict)
}

func (n network) CheckAddresses(context.Context) ([]adminclient.Repair, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.repairs), nil
}

func (n network) TraceEgress(_ context.Context, req adminclient.TraceRequest) (adminclient.Trace, error) {
	if req.Sandbox != id1 {
		return adminclient.Trace{}, errs.Public(errs.ErrNotFound, "no sandbox "+req.Sandbox)
	}
	verdict := map[bool]string{true: "allowed", false: "refused"}[req.Destination == "example.com" && req.Port == 443 && req.Protocol == "tcp"]
	return adminclient.Trace{TraceRequest: req, Verdict: verdict, Rule: "allowOut[0] example.com"}, nil
}

func TestNetLeases(t *testing.T) {
	s := newServer(t, nil)
	s.run("", "net", "leases").want(t, 0, "ADDRESS", "")
	s.run("", "net", "leases", "--json").want(t, 0, "[]\n", "")
	old := time.Now().Add(-90 * time.Minute)
	s.leases = []adminclient.Lease{
		{Address: netip.MustParseAddr("10.87.0.2"), Address6: netip.MustParseAddr("fd00::a57:2"), State: "held", Owner: "u", Sandbox: id1, Name: "default/base-x", Since: old},
		{Address: netip.MustParseAddr("10.87.0.3"), State: "quarantined", Since: old, Reason: "in use by a neighbour"},
		{Address: netip.MustParseAddr("10.87.0.4"), State: "cooling", Since: old, Until: time.Now().Add(50*time.Minute + leeway)},
	}
	s.run("", "net", "leases").want(t, 0, ""+
		"ADDRESS                  STATE         SANDBOX                NAME             FOR   NOTE\n"+
		"10.87.0.2, fd00::a57:2   held          "+id1+"   default/base-x   90m\n"+
		"10.87.0.3                quarantined   -                      -                90m   in use by a neighbour\n"+
		"10.87.0.4                cooling       -                      -                90m   free in 50m\n", "")
	r := s.run("", "net", "leases", "--state", "quarantined", "--json")
	var leases []adminclient.Lease
	if err := json.Unmarshal([]byte(r.stdout), &leases); err != nil || len(leases) != 1 || leases[0].Reason != "in use by a neighbour" {
		t.Errorf("%s, %v", r.stdout, err)
	}
	s.run("", "net", "leases", "--state", "free").want(t, 2, "", `--state: "free" is none of reserved, held, quarantined, cooling`)
	s.run("", "net", "subnets").want(t, 0, ""+
		"SUBNET                    TOTAL   FREE    RESERVED   HELD   COOLING   QUARANTINED   UNREAD   EXCLUDED\n"+
		"10.87.0.0/16, fd00::/64   65534   65530   0          1      1         1             0        1\n"+
		"10.1.0.0/24               -       -       0          2      0         0             0        -\n", "")
	s.run("", "net", "subnets", "--json").want(t, 0, `"subnet": "10.1.0.0/24"`, "")
}

func TestNetRelease(t *testing.T) {
	s := newServer(t, nil)
	s.leases = []adminclient.Lease{
		{Address: netip.MustParseAddr("10.87.0.2"), State: "held", Owner: "u"},
		{Address: netip.MustParseAddr("10.87.0.3"), State: "quarantined"},
	}
	s.run("", "net", "release", "10.87.0.3").want(t, 1, "", "standard input is not a terminal to confirm on; add --yes")
	if len(s.leases) != 2 {
		t.Fatal("it was done without a confirmation")
	}
	s.run("", "net", "release", "10.87.0.3", "--yes").want(t, 0, "10.87.0.3\n", "")
	if len(s.leases) != 1 {
		t.Errorf("leases %+v", s.leases)
	}
	s.run("", "net", "release", "10.87.0.2", "--yes").want(t, 1, "", `barchan: free 10.87.0.2: it is held by "u"`)
	s.run("", "net", "release", "nonsense").want(t, 2, "", "ADDRESS: ")
	s.run("", "net", "release").want(t, 2, "", "ADDRESS is missing")
	s.run("", "net").want(t, 2, "", "one of check, leases, release, subnets, trace")
}

func TestNetCheck(t *testing.T) {
	s := newServer(t, nil)
	s.run("", "net", "check").want(t, 0, "", "leases and machine agree")
	s.run("", "net", "check", "--json").want(t, 0, "[]\n", "")
	s.repairs = []adminclient.Repair{{Kind: "reclaimed", Address: netip.MustParseAddr("10.87.0.2"), Sandbox: id1, Where: "record " + id1, Detail: "in the lease table it was free"}}
	s.run("", "net", "check").want(t, 0, "10.87.0.2   reclaimed   "+id1, "")
	s.repairs = append(s.repairs, adminclient.Repair{Kind: adminclient.RepairConflict, Address: netip.MustParseAddr("10.87.0.9"), Detail: "in use by a; in the lease table it is held by \"b\""})
	s.run("", "net", "check").want(t, 1, "10.87.0.9   conflict ", "barchan: 1 in conflict; no address was taken away")
	s.run("", "net", "check", "--json").want(t, 1, `"kind": "conflict"`, "")
}

func TestNetTrace(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.run("", "net", "trace", id1, "example.com").want(t, 0, "allowed: allowOut[0] example.com\n", "")
	s.run("", "net", "trace", "iaaa", "example.com", "--port", "53", "--protocol", "UDP", "--json").want(t, 0, `"protocol": "udp",`, "")
	r := s.run("", "net", "trace", "iaaa", "example.com", "--port", "53", "--json")
	if !strings.Contains(r.stdout, `"verdict": "refused"`) || !strings.Contains(r.stdout, `"sandboxID": "`+id1+`"`) {
		t.Errorf("%s", r.stdout)
	}
	s.run("", "net", "trace", id2, "example.com").want(t, 1, "", "barchan: no sandbox "+id2+"\n")
	s.run("", "net", "trace", "nope", "example.com").want(t, 1, "", `no sandbox has the name "nope", or an ID that begins so`)
	s.run("", "net", "trace", id1, "example.com", "--port", "70000").want(t, 2, "", "--port")
	s.run("", "net", "trace", id1).want(t, 2, "", "DESTINATION is missing")
	s.run("", "net", "trace", id1, "example.com", "--protocol", "").want(t, 2, "", "--protocol: is empty")
}
