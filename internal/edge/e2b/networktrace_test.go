package e2b

import (
	"context"
	"fmt"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
)

func TestTraceSandboxNetwork(t *testing.T) {
	var asked sandboxes.EgressQuery
	f := newFixtureOf(t, func(c *manager.Config) {
		c.TraceEgress = func(_ context.Context, _ sandbox.ID, q sandboxes.EgressQuery) (sandboxes.EgressDecision, error) {
			asked = q
			switch q.Destination {
			case "no name!":
				return sandboxes.EgressDecision{}, fmt.Errorf("destination: no address or name: %w", errs.ErrInvalid)
			case "gone.example":
				return sandboxes.EgressDecision{}, fmt.Errorf("sandbox is not on this node: %w", errs.ErrNotFound)
			}
			return sandboxes.EgressDecision{Verdict: "refused", Rule: "denyOut[0] 6.0.0.0/8", Source: "sandbox"}, nil
		}
	})
	path := "/sandboxes/" + f.create(`{"templateID":"base"}`).SandboxID + "/network/trace?destination="
	for query, want := range map[string]sandboxes.EgressQuery{
		"6.6.6.6":                         {Destination: "6.6.6.6", Port: 443, Protocol: "tcp"},
		"example.com&port=53":             {Destination: "example.com", Port: 53, Protocol: "tcp"},
		"6.6.6.6&port=65535&protocol=udp": {Destination: "6.6.6.6", Port: 65535, Protocol: "udp"},
	} {
		var got api.EgressDecision
		f.want(200, &got, "GET", path+query, "")
		said := api.EgressDecision{
			Destination: want.Destination, Port: want.Port, Protocol: want.Protocol, Verdict: "refused", Rule: "denyOut[0] 6.0.0.0/8", Source: "sandbox",
		}
		if asked != want || got != said {
			t.Errorf("%s: asked for %+v, answered %+v", query, asked, got)
		}
	}
	asked = sandboxes.EgressQuery{}
	for _, query := range []string{"6.6.6.6&port=0", "6.6.6.6&port=65536", "6.6.6.6&port=x"} {
		f.want(400, nil, "GET", path+query, "")
	}
	f.want(400, nil, "GET", path[:len(path)-len("?destination=")], "")
	f.want(404, nil, "GET", "/sandboxes/none/network/trace?destination=6.6.6.6", "")
	if asked != (sandboxes.EgressQuery{}) {
		t.Errorf("a request that is refused asked for %+v", asked)
	}
	f.want(400, nil, "GET", path+"no%20name!", "")
	f.want(409, nil, "GET", path+"gone.example", "") // the sandbox is not gone
}

// A cluster has no node of ours.
func TestTraceWithoutNode(t *testing.T) {
	f := newFixture(t)
	f.want(501, nil, "GET", "/sandboxes/"+f.create(`{"templateID":"base"}`).SandboxID+"/network/trace?destination=6.6.6.6", "")
}
