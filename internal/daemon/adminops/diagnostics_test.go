package adminops

import (
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
)

// TestDiagnosticsDuringTheBoot: what hangs the boot is in the stacks, before there is a journal.
func TestDiagnosticsDuringTheBoot(t *testing.T) {
	s := New(Config{Log: telemetry.Discard(), Progress: &boot.Progress{}})
	d, err := s.diagnostics(t.Context())
	if err != nil || d.Journal != nil || !strings.Contains(d.Goroutines, "TestDiagnosticsDuringTheBoot") {
		t.Errorf("%+v, %v", d, err)
	}
}
