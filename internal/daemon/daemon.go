package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"

	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/base/migrate"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers/podrun"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/podlogs"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/daemon/adminops"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/eventlog"
	"github.com/barchan-dev/barchan/internal/daemon/feeds"
	"github.com/barchan-dev/barchan/internal/daemon/footprint"
	"github.com/barchan-dev/barchan/internal/daemon/front"
	"github.com/barchan-dev/barchan/internal/daemon/imagegc"
	"github.com/barchan-dev/barchan/internal/daemon/leaserepairs"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/nodesocket"
	"github.com/barchan-dev/barchan/internal/daemon/staleness"
	"github.com/barchan-dev/barchan/internal/daemon/upgrade"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/dashboard"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/edge/sshd"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
)

// drainTime is how long requests may continue after a stop request.
const drainTime = 5 * time.Second

// Config is what New needs.
type Config struct {
	config.Config
	// Version of the program, as `barchan version` prints it.
	Version string
	Log     *slog.Logger
	// AfterReexec is set when the program has executed itself again after an ErrReexec.
	AfterReexec bool
	// Server is the server's process that was started for this node, whose data directory is locked then; nil: none was.
	Server adminops.ServerProcess
	// NodeComes is set in that process: its boot waits for the node.
	NodeComes bool
}

// Daemon is one server.
type Daemon struct {
	cfg      Config
	log      *slog.Logger
	started  time.Time
	stop     context.CancelCauseFunc // set by Run
	progress *boot.Progress
	metrics  *prometheus.Registry
	health   *health.Gate
	repairs  *leaserepairs.Queue
	unlock   func() error // releases the data directory
	broken   chan error   // receives why the files of this process can no longer be trusted
	booted   bool         // see Booted
	tracer   trace.TracerProvider

	// What the phases make, in their order. Each is written once, before ready.
	before        upgrade.Before
	migrations    *migrate.Migrations // nil in a replica
	plain, secure *front.HTTP
	metricsFront  *front.HTTP // nil: not served
	ssh           *front.SSH  // nil: not served, as hostKey
	hostKey       *sshd.HostKey
	ca            *localca.CA
	acme          *acme.Manager // nil without ACME
	tokens        *sandbox.Tokens
	api           *apiserver.Server       // nil but in a server
	verifier      *identity.Verifier      // of agents; nil but on a cluster, where an address may be given away at once
	stale         time.Duration           // after which a replica's routes are trusted no more, without a verifier
	watches       *staleness.ShortWatches // nil but in a replica
	rest          *rest.Config            // reaches the API server as our own parts
	cache         *cache.Cache
	objects       sandboxes.Objects  // past HTTP, where the API server is in this process
	machine       *machine.Machine   // nil where no sandboxes run
	images        *imagegc.Collector // beside machine
	content       http.Handler       // files of volumes, at the socket of a node in a process of its own; else nil
	apart         *nodesocket.Client // of a server's node in a process of its own; nil: there is none
	runner        *podrun.Runner     // nil but in a controller
	routes        *route.Table
	peers         *peers.Replica   // nil where there are none
	observers     []feeds.Observer // of sandboxes, in the order of their calls
	picker        *picker.Picker
	assumed       *assumecache.Sandboxes
	listing       *sandboxes.Listing
	phases        *feeds.Phases
	quotas        *quota.Quotas
	binder        *agentclient.Client
	podLogs       *podlogs.Agents // of a replica on a cluster
	manager       *manager.Manager
	builds        *builds.Store // files of template builds; nil but in a server
	eventLog      *eventlog.Log // nil but in a server and a cluster's replicas
	audit         *auditlog.Log // nil: nothing is recorded
	recorder      events.EventRecorder
	flushEvents   func()
	dashboard     *dashboard.Server
	forwarded     http.Handler // what serveForwarded serves
	gateway       *gateway.Gateway
	admin         *adminapi.API
}

// serviceName is the process' name in traces.
func (d *Daemon) serviceName() string {
	if d.cfg.Role == config.RoleServer {
		return "barchan"
	}
	return "barchan-" + d.cfg.Role
}

var errStopRequested = errors.New("stop requested")

// New checks the configuration and starts nothing.
func New(cfg Config) (*Daemon, error) {
	if cfg.Log == nil {
		return nil, fmt.Errorf("daemon: Log is required: %w", errs.ErrInvalid)
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	d := &Daemon{cfg: cfg, log: cfg.Log.With(telemetry.Component, "daemon"), metrics: telemetry.NewRegistry(cfg.Version), routes: route.NewTable()}
	gate, err := health.NewGate(cfg.Log, d.metrics)
	if err != nil {
		return nil, err
	}
	d.health, d.progress, d.broken = gate, boot.NewProgress(d.log, gate, d.routes.Synced), make(chan error, 1)
	d.repairs = leaserepairs.NewQueue(d.log)
	return d, nil
}

// Run boots the server and serves until ctx is done, a part fails or the administrator stops it.
// Sandboxes keep running, unless the administrator had all removed.
func (d *Daemon) Run(ctx context.Context) (err error) {
	d.started = time.Now()
	ctx, d.stop = context.WithCancelCause(ctx)
	defer d.stop(nil)
	tracer, endTracing, err := telemetry.NewTracing(ctx, telemetry.TraceConfig{Endpoint: d.cfg.OTLPEndpoint, Service: d.serviceName(), Version: d.cfg.Version, Ratio: float64(d.cfg.OTLPSamplePercent) / 100})
	if err != nil {
		return fmt.Errorf("otlpEndpoint: %w", err)
	}
	d.tracer = tracer
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		if err := endTracing(flush); err != nil { // a collector that is away costs spans, nothing else
			d.log.WarnContext(flush, "last traces not delivered", telemetry.Error, err)
		}
	}()
	var stack lifecycle.Stack
	usualGC := footprint.DelayGC()
	err = boot.Run(ctx, d.bootPhases(), d.progress, &stack)
	if usualGC(); err != nil {
		d.progress.SetStopping()
		return d.stopped(ctx, errors.Join(err, d.stopAll(&stack)))
	}
	d.progress.SetReady()
	d.booted = true
	resting, endRest := context.WithCancel(ctx)
	var releases sync.WaitGroup
	releases.Go(func() { footprint.Run(resting, d.log) })
	defer releases.Wait()
	defer endRest()
	d.log.InfoContext(ctx, "ready", telemetry.Duration, time.Since(d.started), "http", d.plain.Addr().String())
	var broken error
	select {
	case <-ctx.Done():
	case <-stack.Failed():
	case broken = <-d.broken:
	}
	d.progress.SetStopping()
	d.log.InfoContext(ctx, "stopping; sandboxes keep running")
	return d.lost(ctx, errors.Join(broken, d.stopAll(&stack)))
}

// Booted reports whether Run has been ready. It is called after Run.
func (d *Daemon) Booted() bool { return d.booted }

// bind takes an address; key is its setting.
func (d *Daemon) bind(ctx context.Context, key, addr string, tlsConfig *tls.Config) (*front.HTTP, error) {
	cfg := front.Config{Early: d.progress.Handler(), Log: d.cfg.Log, ClientConnections: d.cfg.ClientConnections, ClientIdle: d.cfg.ClientIdle, Drain: drainTime}
	return cfg.Bind(ctx, key, addr, tlsConfig)
}

// stopped is what comes of a boot that ended with err. One that was stopped has not failed.
func (d *Daemon) stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // see above
	}
	return d.lost(ctx, err)
}

// open puts the real handler into every listener.
func (d *Daemon) open(h http.Handler) {
	d.plain.Open(h)
	if d.secure != nil {
		d.secure.Open(h)
	}
}
