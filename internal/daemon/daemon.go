package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/base/migrate"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// drainTime is how long requests may go on after the server was asked to stop.
const drainTime = 5 * time.Second

// Config is what New needs.
type Config struct {
	config.Config
	// Version of the program, as `barchan version` prints it.
	Version string
	Log     *slog.Logger
	// AfterReexec says that the program started itself again after an ErrReexec.
	AfterReexec bool
}

// Daemon is one server.
type Daemon struct {
	cfg     Config
	log     *slog.Logger
	started time.Time
	stop    context.CancelCauseFunc // set by Run
	phases  phases
	metrics *prometheus.Registry
	health  *health.Gate
	repairs chan ipam.Repair // of the books of addresses, for their Events
	broken  chan error       // receives why the files of this process can no longer be trusted
	tracer  trace.TracerProvider

	// What the phases make, in their order. Each is written once, before ready.
	before        before
	migrations    *migrate.Migrations // nil in a replica
	plain, secure *front
	ca            *localca.CA
	acme          *acme.Manager // nil: no authority is asked for certificates
	tokens        *sandbox.Tokens
	api           *apiserver.Server // nil in a replica
	stale         time.Duration     // after which a replica's routes are trusted no more
	watches       *shortWatches     // nil but in a replica
	rest          *rest.Config      // reaches the API server as our own parts
	cache         *cache.Cache
	objects       manager.Objects // past HTTP, where the API server is in this process
	machine       *machine        // nil in a replica
	routes        *route.Table
	peers         *peers.Replica // nil where there are none
	picker        *picker.Picker
	quotas        *quota.Quotas
	binder        *manager.AgentBinder
	manager       *manager.Manager
	gateway       *gateway.Gateway
	admin         *adminapi.API
}

var errAsked = errors.New("asked to stop")

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
	d.health, d.phases.log, d.phases.health, d.broken = gate, d.log, gate, make(chan error, 1)
	d.phases.serves = d.routes.Synced
	d.repairs = make(chan ipam.Repair, mostRepairs)
	return d, nil
}

// Run boots the server and serves until ctx is done, or until a part fails, or until the
// administrator says so. Sandboxes run on, unless all were removed on the administrator's word.
func (d *Daemon) Run(ctx context.Context) (err error) {
	d.started = time.Now()
	ctx, d.stop = context.WithCancelCause(ctx)
	defer d.stop(nil)
	tracer, endTracing, err := telemetry.NewTracing(ctx, telemetry.TraceConfig{Endpoint: d.cfg.OTLPEndpoint, Service: "barchan", Version: d.cfg.Version})
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
	if err := d.phases.do(ctx, "disk", d.awaitRoom); err != nil {
		return d.stopped(ctx, err)
	}
	release, err := d.takeDataDir(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	var stack lifecycle.Stack
	if err := d.boot(ctx, &stack); err != nil {
		d.phases.setStopping()
		return d.stopped(ctx, errors.Join(err, d.stopAll(&stack)))
	}
	d.phases.setReady()
	d.log.InfoContext(ctx, "ready", telemetry.Duration, time.Since(d.started), "http", d.plain.listener.Addr().String())
	var broken error
	select {
	case <-ctx.Done():
	case <-stack.Failed():
	case broken = <-d.broken:
	}
	d.phases.setStopping()
	d.log.InfoContext(ctx, "stopping; sandboxes run on")
	return d.lost(ctx, errors.Join(broken, d.stopAll(&stack)))
}

// stopped is what comes of a boot that ended with err. One that was stopped has not failed.
func (d *Daemon) stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // see above
	}
	return d.lost(ctx, err)
}

// takeDataDir is the first phase. It refuses what would end in half a boot.
func (d *Daemon) takeDataDir(ctx context.Context) (release func() error, err error) {
	err = d.phases.do(ctx, "lock", func(context.Context) (err error) {
		if release, err = lockDir(d.cfg.DataDir); err != nil {
			return err
		}
		if d.cfg.Role == config.RoleServer {
			err = d.cfg.CheckHost()
		}
		if err == nil {
			err = sweepFiles(&d.cfg.Config)
		}
		if err == nil {
			d.before, err = lookBefore(&d.cfg.Config)
		}
		if err == nil {
			err = config.Save(d.cfg.Config)
		}
		if err != nil {
			return errors.Join(err, release())
		}
		return nil
	})
	return release, err
}

// bootPhase is one step of the boot. What it starts it puts on the stack.
type bootPhase struct {
	name string
	step func(context.Context, *lifecycle.Stack) error
}

// bootPhases are the steps of a role in their order; the one before them takes the data directory.
func (d *Daemon) bootPhases() []bootPhase {
	if d.cfg.Role == config.RoleReplica {
		return []bootPhase{
			{"bind", d.bindListeners},
			{"connect", d.connect},
			{"caches", d.startCaches},
			{"routes", d.startFeeds},
			{"peers", d.startPeers},
			{"manager", d.startManager},
			{"serve", d.startServing},
		}
	}
	return []bootPhase{
		{"bind", d.bindListeners},
		{"migrate", d.migrateStorage},
		{"api", d.startAPI},
		{"migrate-objects", d.migrateObjects},
		{"defaults", d.makeDefaults},
		{"caches", d.startCaches},
		{"node", d.startNode},
		{"routes", d.startFeeds},
		{"peers", d.startPeers},
		{"manager", d.startManager},
		{"controllers", d.startControllers},
		{"serve", d.startServing},
	}
}

// boot does the phases in order. What it started is on the stack, also when it fails.
func (d *Daemon) boot(ctx context.Context, stack *lifecycle.Stack) error {
	for _, p := range d.bootPhases() {
		err := d.phases.do(ctx, p.name, func(ctx context.Context) error { return p.step(ctx, stack) })
		if err == nil {
			select {
			case <-stack.Failed():
				err = fmt.Errorf("boot phase %q: a part that it started has ended", p.name)
			default:
				err = context.Cause(ctx)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// bindListeners takes the ports, so that one in use is told before anything is touched.
func (d *Daemon) bindListeners(ctx context.Context, stack *lifecycle.Stack) (err error) {
	if d.plain, err = d.bind(ctx, "httpAddr", d.cfg.HTTPAddr, nil); err != nil {
		return err
	}
	if err := d.push(ctx, stack, "http", d.plain.run); err != nil {
		return err
	}
	if d.cfg.TLSAddr != "" {
		tlsConfig, err := d.certificates(ctx)
		if err != nil {
			return err
		}
		if d.secure, err = d.bind(ctx, "tlsAddr", d.cfg.TLSAddr, tlsConfig); err != nil {
			return err
		}
		if err := d.push(ctx, stack, "https", d.secure.run); err != nil {
			return err
		}
	}
	if d.acme != nil { // both ports are open for the authority's questions
		d.plain.before(d.acme.ServeChallenge)
		if err := d.push(ctx, stack, "acme", d.acme.Run); err != nil {
			return err
		}
	}
	if err := d.startHealth(ctx, stack); err != nil {
		return err
	}
	return d.startAdmin(ctx, stack)
}

// push puts a service that is of use at once on the stack.
func (d *Daemon) push(ctx context.Context, stack *lifecycle.Stack, name string, run func(context.Context) error) error {
	return stack.Push(ctx, name, func(ctx context.Context, ready func()) error {
		ready()
		return run(ctx)
	})
}

// open puts the real handler into every listener.
func (d *Daemon) open(h http.Handler) {
	d.plain.open(h)
	if d.secure != nil {
		d.secure.open(h)
	}
}
