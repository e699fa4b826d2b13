package quotas_test

import (
	"maps"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/quotas"
)

// Texts are what annotations would have; a setting of 0 is no limit.
func TestTexts(t *testing.T) {
	cfg := config.Default()
	cfg.QuotaSandboxes, cfg.QuotaCreates, cfg.QuotaVolumes = 7, 200, 0
	cfg.QuotaCPU, cfg.QuotaMemory, cfg.QuotaStored = resource.MustParse("2.5"), resource.MustParse("16Gi"), resource.MustParse("1Ti")
	want := map[string]string{
		"sandboxes": "7", "creates": "200", "cpu": "2500m", "memory": "16Gi", "stored": "1Ti", "contents": "256Mi",
		"templates": "1000", "snapshots": "10000", "builds": "100", "webhooks": "50", "keys": "1000",
	}
	if got := quotas.Texts(&cfg); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
