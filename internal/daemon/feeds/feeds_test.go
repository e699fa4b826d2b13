package feeds

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/testkit/fakeapi"
)

// TestQuotasWaitForEveryKind holds the list of one kind after the other: until it is there, the quotas would let too much through.
func TestQuotasWaitForEveryKind(t *testing.T) {
	for _, kind := range []string{"sandboxtemplates", "checkpoints", "apikeys", "secrets", "templatebuilds"} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := fakeapi.New()
				release := api.Hold(kind)
				c, err := cache.New(t.Context(), cache.Config{REST: api.Config()})
				if err != nil {
					t.Fatal(err)
				}
				quotas, err := quota.New(quota.Config{Reader: c, Log: telemetry.Discard()})
				if err != nil {
					t.Fatal(err)
				}
				ready, ended := make(chan struct{}), make(chan error, 2)
				go func() { ended <- c.Run(t.Context()) }()
				feed := Quotas{Cache: c, Quotas: quotas, ServerKinds: true}
				go func() { ended <- feed.Run(t.Context(), func() { close(ready) }) }()
				select {
				case <-ready:
					t.Error("ready without the list")
				case err := <-ended:
					t.Errorf("ended: %v", err)
				case <-time.After(time.Minute):
				}
				release()
				select {
				case <-ready:
				case <-time.After(time.Minute):
					t.Error("not ready with all lists")
				}
			})
		})
	}
}
