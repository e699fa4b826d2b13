package e2b

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestAuditLog has what changes something recorded, with the caller and the result, and no secret with it.
func TestAuditLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	log, err := auditlog.Open(auditlog.Config{Path: path, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- log.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done }) //nolint:errcheck // it returns none
	f := newFixture(t, func(c *Config) { c.Audit = log })

	var user api.CreatedAPIKey
	f.want(201, &user, "POST", "/api-keys", `{"name":"ci","scope":"use"}`)
	s := f.create(`{"templateID":"base","envVars":{"TOKEN":"hush"}}`)
	f.want(200, nil, "GET", "/v2/sandboxes", "")
	f.want(403, nil, "POST", "/volumes", `{"name":"v"}`, "X-API-Key", user.Key)
	f.want(401, nil, "DELETE", "/sandboxes/"+s.SandboxID, "", "X-API-Key", "e2b_none")
	f.want(404, nil, "DELETE", "/sandboxes/"+s.SandboxID, "", "X-API-Key", f.other)
	f.want(204, nil, "DELETE", "/sandboxes/"+s.SandboxID, "", "X-API-Key", user.Key)

	var got []auditlog.Entry
	eventually.True(t, "the kill is recorded", func() bool {
		got = nil
		err := auditlog.Read(ctx, path, auditlog.Filter{}, false, func(e auditlog.Entry) error { got = append(got, e); return nil })
		return err == nil && len(got) > 0 && got[len(got)-1].Action == "delete sandboxes" && got[len(got)-1].Status == 204
	})
	var short []string
	for _, e := range got {
		short = append(short, e.Namespace+" "+e.Action+" "+e.Result+" "+e.Sandbox+strings.Join(e.Made, ","))
		if e.By != auditlog.ByKey || !strings.HasPrefix(e.Name, "key-") || e.Address != "127.0.0.1" || e.Request == "" {
			t.Errorf("entry is %+v", e)
		}
	}
	want := []string{
		team + " create apikeys ok ", team + " create sandboxes ok " + s.SandboxID, team + " create volumes refused ",
		otherTeam + " delete sandboxes refused " + s.SandboxID, team + " delete sandboxes ok " + s.SandboxID,
	}
	if !slices.Equal(short, want) {
		t.Errorf("recorded\n%s\nwant\n%s", strings.Join(short, "\n"), strings.Join(want, "\n"))
	}
	if got[1].Name == got[4].Name {
		t.Errorf("two keys have one name, %s", got[1].Name)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"hush", f.key, user.Key, *s.EnvdAccessToken} {
		if strings.Contains(string(text), secret) {
			t.Errorf("the log has the secret %s", secret)
		}
	}
}
