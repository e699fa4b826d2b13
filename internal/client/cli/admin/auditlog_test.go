package admin

import (
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
)

// TestAuditLineIsOneLine: a tenant chooses the ID in a path, which is recorded as it came. It must not look like an entry of its own,
// nor reach the terminal as a command.
func TestAuditLineIsOneLine(t *testing.T) {
	bad := "x\n2026-11-28 16:15:22  key admin\x1b]0;owned\a\u202e"
	line := auditLine(&auditlog.Entry{
		Time: time.Unix(0, 0), By: "key", Name: bad, Namespace: bad, Action: bad, Request: bad, Object: bad, Sandbox: bad, Made: []string{bad}, Address: bad, Result: bad,
	})
	if strings.ContainsAny(line, "\n\x1b\a\u202e") {
		t.Errorf("%q", line)
	}
}
