package daemon

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/migrate"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/audit"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/certificates"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/upgrade"
)

// What phases provide for each other.
const (
	freeDisk        boot.Resource = "free disk"
	dataDir         boot.Resource = "data directory"
	listeners       boot.Resource = "listeners"
	migratedStorage boot.Resource = "migrated storage"
	openedNode      boot.Resource = "tokens and files of the node"
	apiServer       boot.Resource = "API server"
	migratedObjects boot.Resource = "migrated objects"
	defaultObjects  boot.Resource = "default objects"
	listedObjects   boot.Resource = "listed objects"
	adoptedNode     boot.Resource = "node with adopted sandboxes"
	filledTables    boot.Resource = "routes, pool members and quotas"
	joinedPeers     boot.Resource = "peers"
	runningManager  boot.Resource = "manager"
	reconciling     boot.Resource = "controllers"
)

type (
	resources = []boot.Resource
	services  = []boot.Service
)

// bootPhases returns the phases of this role in order.
func (d *Daemon) bootPhases() []boot.Phase {
	switch first := d.firstPhases(); d.cfg.Role {
	case config.RoleController:
		return slices.Concat(first, d.connectPhases(), d.clusterPhases())
	case config.RoleReplica:
		return slices.Concat(first, d.connectPhases(), d.replicaPhases())
	case config.RoleNode:
		return slices.Concat(first, d.nodePhases())
	default:
		return slices.Concat(first, d.serverPhases())
	}
}

// firstPhases are those of all roles.
func (d *Daemon) firstPhases() []boot.Phase {
	return []boot.Phase{
		{Name: "disk", Provides: resources{freeDisk}, Run: d.awaitDisk},
		{Name: "lock", Needs: resources{freeDisk}, Provides: resources{dataDir}, Run: d.takeDataDir, Services: d.lockServices},
		{Name: "bind", Needs: resources{dataDir}, Provides: resources{listeners}, Run: d.bindListeners, Services: d.listenerServices},
	}
}

// connectPhases replace those of the server whose API a role uses.
func (d *Daemon) connectPhases() []boot.Phase {
	return []boot.Phase{
		{Name: "connect", Needs: resources{listeners}, Provides: resources{apiServer}, Run: d.connect},
		{Name: "caches", Needs: resources{apiServer}, Provides: resources{listedObjects}, Run: d.makeCache, Services: d.cacheServices},
	}
}

// serverPhases follow those of all roles. The package comment lists them.
func (d *Daemon) serverPhases() []boot.Phase {
	return []boot.Phase{
		// A port in use is reported before a file changes.
		{Name: "migrate", Needs: resources{listeners}, Provides: resources{migratedStorage}, Run: d.migrateStorage},
		// The node reads its files while the API server starts.
		{Name: "open-node", Needs: resources{migratedStorage}, Provides: resources{openedNode}, Run: d.openNode, Services: d.nodeFiles},
		{Name: "api", Needs: resources{migratedStorage, openedNode}, Provides: resources{apiServer}, Run: d.makeAPI, Services: d.apiServices},
		{Name: "migrate-objects", Needs: resources{apiServer}, Provides: resources{migratedObjects}, Run: d.migrateObjects},
		{Name: "defaults", Needs: resources{migratedObjects}, Provides: resources{defaultObjects}, Run: d.makeDefaults},
		{Name: "caches", Needs: resources{migratedObjects}, Provides: resources{listedObjects}, Run: d.makeCache, Services: d.cacheServices},
		// The node compares its rows with objects, so it needs the complete list.
		{Name: "node", Needs: resources{openedNode, listedObjects}, Provides: resources{adoptedNode}, Run: d.makeNode, Services: d.nodeServices},
		// A deleted object is reported to the node.
		{Name: "routes", Needs: resources{listedObjects, adoptedNode}, Provides: resources{filledTables}, Run: d.makeTables, Services: d.tableServices},
		{Name: "peers", Needs: resources{filledTables}, Provides: resources{joinedPeers}, Run: d.makePeers, Services: d.peerServices},
		{Name: "manager", Needs: resources{filledTables, joinedPeers}, Provides: resources{runningManager}, Run: d.makeManager, Services: d.managerServices},
		// An orphaned member is returned through the manager.
		{
			Name: "controllers", Needs: resources{adoptedNode, migratedObjects, runningManager}, Provides: resources{reconciling},
			Run: d.makeRecorder, Services: d.controllerServices,
		},
		{Name: "serve", Needs: resources{listeners, defaultObjects, runningManager, reconciling}, Run: d.makeGateway, Services: d.gatewayServices},
	}
}

// replicaPhases serve the E2B API and the gateway.
func (d *Daemon) replicaPhases() []boot.Phase {
	return []boot.Phase{
		{Name: "routes", Needs: resources{listedObjects}, Provides: resources{filledTables}, Run: d.makeTables, Services: d.tableServices},
		{Name: "peers", Needs: resources{filledTables}, Provides: resources{joinedPeers}, Run: d.makePeers, Services: d.peerServices},
		{Name: "manager", Needs: resources{filledTables, joinedPeers}, Provides: resources{runningManager}, Run: d.makeManager, Services: d.managerServices},
		{Name: "serve", Needs: resources{listeners, runningManager}, Run: d.makeGateway, Services: d.gatewayServices},
	}
}

// clusterPhases end with the election, in which a controller waits for its turn.
func (d *Daemon) clusterPhases() []boot.Phase {
	return []boot.Phase{
		{Name: "pools", Needs: resources{listedObjects}, Provides: resources{filledTables}, Run: d.makeTables, Services: d.tableServices},
		{Name: "election", Needs: resources{listeners, filledTables}, Run: d.makeRunner, Services: d.electionServices},
	}
}

// nodePhases run the sandboxes of a server that is another process.
func (d *Daemon) nodePhases() []boot.Phase {
	return []boot.Phase{
		{Name: "migrate", Needs: resources{listeners}, Provides: resources{migratedStorage}, Run: d.migrateStorage},
		{Name: "open-node", Needs: resources{migratedStorage}, Provides: resources{openedNode}, Run: d.openNode, Services: d.nodeFiles},
		{Name: "connect", Needs: resources{openedNode}, Provides: resources{apiServer}, Run: d.connect},
		{Name: "caches", Needs: resources{apiServer}, Provides: resources{listedObjects}, Run: d.makeCache, Services: d.cacheServices},
		{Name: "node", Needs: resources{openedNode, listedObjects}, Provides: resources{adoptedNode}, Run: d.makeNode, Services: d.nodeServices},
		// A deleted object is reported to the node.
		{Name: "claims", Needs: resources{adoptedNode}, Provides: resources{filledTables}, Run: d.makeClaimTimes, Services: d.claimTimeServices},
		{Name: "controllers", Needs: resources{filledTables}, Provides: resources{reconciling}, Run: d.makeRecorder, Services: d.controllerServices},
		{Name: "serve", Needs: resources{reconciling}, Run: d.openProbes, Services: d.nodeSocketServices},
	}
}

// takeDataDir refuses what would end in half a boot.
func (d *Daemon) takeDataDir(ctx context.Context) (err error) {
	release, passable := func() error { return nil }, fs.FileMode(0o010)
	if d.cfg.Server == nil {
		passable = 0
		if release, err = machine.Lock(d.cfg.DataDir); err != nil {
			return err
		}
	}
	err = machine.Protect(ctx, d.cfg.DataDir, passable, d.log)
	if err == nil && d.cfg.RunsSandboxes() {
		err = d.cfg.CheckHost()
	}
	if err == nil {
		err = audit.SweepFiles(&d.cfg.Config)
	}
	if err == nil {
		d.before, err = upgrade.Look(&d.cfg.Config)
	}
	if err == nil {
		err = config.Save(d.cfg.Config)
	}
	if err != nil {
		return errors.Join(err, release())
	}
	d.unlock = release
	return nil
}

// migrateStorage brings files and databases of older versions to the form of this one.
func (d *Daemon) migrateStorage(ctx context.Context) (err error) {
	d.migrations, err = upgrade.Open(migrate.Config{Version: d.cfg.Version, Log: d.cfg.Log}, d.cfg.DataDir, d.before)
	if err != nil {
		return err
	}
	return d.migrations.Run(ctx, migrate.Storage)
}

// migrateObjects does the same for objects, while only the API server runs.
func (d *Daemon) migrateObjects(ctx context.Context) error {
	return d.migrations.Run(ctx, migrate.Objects)
}

// lockServices hold the lock of the data directory until all later services have stopped.
func (d *Daemon) lockServices() services {
	return services{boot.Background("lock", func(ctx context.Context) error {
		<-ctx.Done()
		return d.unlock()
	})}
}

// bindListeners takes the ports, so that a port in use is reported before anything changes.
func (d *Daemon) bindListeners(ctx context.Context) (err error) {
	if d.plain, err = d.bind(ctx, "httpAddr", d.cfg.HTTPAddr, nil); err != nil {
		return err
	}
	if d.cfg.TLSAddr != "" && d.cfg.ServesTraffic() {
		c, err := certificates.Open(ctx, &d.cfg.Config, d.log)
		if err == nil {
			d.ca, d.acme = c.CA, c.ACME
			d.secure, err = d.bind(ctx, "tlsAddr", d.cfg.TLSAddr, c.TLS)
		}
		if err != nil {
			return errors.Join(err, d.plain.Close())
		}
	}
	if err := d.bindMetrics(ctx); err != nil {
		return err
	}
	if d.cfg.SSHAddr != "" && d.cfg.ServesTraffic() {
		if err := d.bindSSH(ctx); err != nil {
			return err
		}
	}
	if d.acme != nil {
		d.plain.Before(d.acme.ServeChallenge)
	}
	if path := d.cfg.AuditFile(); path != "" && d.cfg.ServesTraffic() {
		d.audit, err = auditlog.Open(auditlog.Config{Path: path, MaxSize: d.cfg.AuditLogSize.Value(), MaxFiles: d.cfg.AuditLogFiles, Log: d.cfg.Log, Metrics: d.metrics})
		if err != nil {
			return err
		}
	}
	return d.makeAdmin()
}

// listenerServices answer from here on, and watch the disk and the memory.
func (d *Daemon) listenerServices() services {
	var list services
	if d.audit != nil { // first, and so the last to stop
		list = append(list, boot.Background("audit", d.audit.Run))
	}
	list = append(list, boot.Background("http", d.plain.Run))
	if d.metricsFront != nil {
		list = append(list, boot.Background("metrics", d.metricsFront.Run))
	}
	if d.secure != nil {
		list = append(list, boot.Background("https", d.secure.Run))
	}
	if d.ssh != nil {
		list = append(list, boot.Background("ssh", d.ssh.Run))
	}
	if d.acme != nil { // both ports are open for the authority's challenges
		list = append(list, boot.Background("acme", d.acme.Run))
	}
	return append(list, boot.Background("disk", d.host().WatchSpace), boot.Background("writes", d.host().WatchWrites), boot.Background("admin", d.admin.Run))
}
