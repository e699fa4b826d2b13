package e2b

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/testkit/hostileagent"
)

// TestHostileAgent has an agent that a tenant has replaced answer what clients ask of their sandbox. The server is not at fault: the
// statuses are those of a gateway, and a silent agent holds no request.
func TestHostileAgent(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	certain := map[string]int{
		"silence": http.StatusGatewayTimeout, "head without a body": http.StatusGatewayTimeout, "a byte a second": http.StatusGatewayTimeout,
		"web page": http.StatusBadGateway, "terminal escapes": http.StatusBadGateway, "long error": http.StatusBadGateway,
	}
	attacks := hostileagent.Attacks()
	attacks["redirect"] = hostileagent.Redirect("http://127.0.0.1:1/")
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			agent := hostileagent.Start(t, attack)
			limit := 30 * time.Second
			if certain[name] == http.StatusGatewayTimeout {
				limit = 50 * time.Millisecond
			}
			f := newFixtureOf(t, func(c *manager.Config) {
				c.Agents = agentclient.New(agentclient.Config{
					Tokens: tokens, AnswerTimeout: limit, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
						return (&net.Dialer{}).DialContext(ctx, "tcp", agent.Address)
					},
				})
			})
			id := f.create(`{"templateID":"base"}`).SandboxID
			for _, path := range []string{"/sandboxes/" + id + "/metrics", "/sandboxes/" + id + "/logs", "/v2/sandboxes/" + id + "/logs", "/sandboxes/metrics?sandbox_ids=" + id} {
				status, text, _ := f.do(http.MethodGet, path, "")
				if strings.Contains(path, "sandbox_ids") { // others of the list are answered
					if status != http.StatusOK {
						t.Errorf("%s: %d %s", path, status, text)
					}
					continue
				}
				if status != http.StatusBadGateway && status != http.StatusGatewayTimeout && status != http.StatusOK || certain[name] != 0 && status != certain[name] || len(text) > 1<<10 {
					t.Errorf("%s: %d %.200s", path, status, text)
				}
			}
		})
	}
}
