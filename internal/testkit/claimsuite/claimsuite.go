// Package claimsuite tests a controller of SandboxClaims on an API server: the embedded one, or
// that of a cluster. The cache and the picker are the real ones; sandboxes are a stand-in's, which
// makes them ready in word alone, and pools are filled by the tests.
package claimsuite

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Config is what the suite tests. REST and New are required.
type Config struct {
	// REST connects to an API server that serves our kinds, with all permissions.
	REST *rest.Config
	// New makes the controller under test.
	New func(Parts) (Starter, error)
	// NoCollector is set where no garbage collector deletes objects without an owner, as on a kube-apiserver
	// without a controller manager: what needs it is left out.
	NoCollector bool
}

// Starter is a controller; Start blocks until ctx is done.
type Starter interface {
	Start(ctx context.Context) error
}

// Binder sends a request to the agent of a running sandbox, and has one run before it is needed.
type Binder interface {
	Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error
	Wake(ctx context.Context, member *agents.Sandbox)
}

// Parts are what a controller is made of.
type Parts struct {
	Client client.Client
	Cache  *cache.Cache
	Picker *picker.Picker
	Binder Binder
	Quota  *quota.Quotas
	Events events.EventRecorder
	// Assumed is fed by the cache's events.
	Assumed *assumecache.Sandboxes
	// Upstream gets the metrics with agent-sandbox's names.
	Upstream prometheus.Registerer
	// Annotate has claims get the annotations of which sandbox they have and when they were first seen.
	Annotate bool
	// Patience is how long a claim waits for a member that is being created.
	Patience time.Duration
}

// Run runs the suite.
func Run(t *testing.T, cfg Config) {
	for _, test := range []struct {
		name      string
		collector bool
		run       func(*testing.T, *Config)
	}{
		{"Warm", false, warm},
		{"Cold", false, cold},
		{"PoolAndTemplateToCome", false, poolAndTemplateToCome},
		{"Env", false, env},
		{"EnvNotTaken", false, envNotTaken},
		{"EnvBoundOnce", false, envBoundOnce},
		{"EnvNeverTaken", false, envNeverTaken},
		{"Metadata", false, metadata},
		{"Volumes", false, volumes},
		{"NameTaken", false, nameTaken},
		{"Quota", false, overQuota},
		{"Queue", false, queue},
		{"QueueWithRoom", false, queueWithRoom},
		{"QueueTimeout", false, queueTimeout},
		{"QueueLeft", false, queueLeft},
		{"QueueRestart", false, queueRestart},
		{"Forbidden", false, forbidden},
		{"ExpiryRetains", false, expiryRetains},
		{"ExpiryExtended", false, expiryExtended},
		{"ExpiryDeletes", true, expiryDeletes},
		{"TTL", false, ttl},
		{"OutlivesPoolAndTemplate", false, outlives},
		{"SandboxMissing", false, sandboxMissing},
		{"ClaimDeleted", true, claimDeleted},
		{"ClaimDeletedWhileServed", false, claimDeletedWhileServed},
		{"Promise9KilledBetweenWrites", false, killed},
		{"Promise2KilledBetweenWritesTemplateUpdated", false, killedUpdated},
		{"Promise2ColdTemplateUpdated", false, coldUpdated},
		{"Waits", false, waits},
		{"UpstreamMetrics", false, upstreamMetrics},
		{"Annotations", false, annotations},
		{"Promise2UpdatedUnderClaims", false, updatedUnderClaims},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.collector && cfg.NoCollector {
				t.Skip("the server has no garbage collector")
			}
			test.run(t, &cfg)
		})
	}
}
