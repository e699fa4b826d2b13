package e2b

import (
	"net/http"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/manager"
)

func TestRefusalOverTheWire(t *testing.T) {
	gate, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	f := newFixtureOf(t, func(c *manager.Config) { c.Gate = gate })
	s := f.create(`{"templateID":"base"}`)
	gate.Set("disk", errs.Public(nil, "no room"))
	status, text, header := f.do("POST", "/v2/sandboxes", `{"templateID":"base"}`)
	if status != http.StatusServiceUnavailable || header.Get("Retry-After") != "5" || !strings.Contains(text, "(disk: no room)") {
		t.Errorf("create = %d %s, Retry-After %q; want 503 with the reason", status, text, header.Get("Retry-After"))
	}
	f.want(http.StatusOK, nil, "GET", "/sandboxes/"+s.SandboxID, "")
	f.want(http.StatusNoContent, nil, "DELETE", "/sandboxes/"+s.SandboxID, "")
	gate.Set("disk", nil)
	f.create(`{"templateID":"base"}`)
}
