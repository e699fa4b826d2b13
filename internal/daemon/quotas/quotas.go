// Package quotas derives the quotas of namespaces without their own from the settings and the machine.
package quotas

import (
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
)

// leastByMachine is how many sandboxes a namespace may have on any machine.
const leastByMachine = 64

// Defaults returns the limits of the settings, in which zero means that there is none.
func Defaults(cfg *config.Config) quota.Limits {
	limit := func(n int64) quota.Limit { return quota.Limit{Set: n > 0, Most: n} }
	return quota.Limits{
		Sandboxes: limit(sandboxes(cfg)), Creates: limit(int64(cfg.QuotaCreates)), MilliCPU: limit(cfg.QuotaCPU.MilliValue()),
		Volumes: limit(int64(cfg.QuotaVolumes)), VolumeCapacity: limit(cfg.QuotaVolumeCapacity.Value()), Stored: limit(stored(cfg)),
		Memory: limit(cfg.QuotaMemory.Value()), CountPaused: cfg.QuotaCounts == config.QuotaAll,
		Objects: [...]quota.Limit{
			quota.Templates: limit(int64(cfg.QuotaTemplates)), quota.Snapshots: limit(int64(cfg.QuotaSnapshots)), quota.Builds: limit(int64(cfg.QuotaBuilds)),
			quota.Webhooks: limit(int64(cfg.QuotaWebhooks)), quota.Keys: limit(int64(cfg.QuotaKeys)),
		},
	}
}

// sandboxes returns how many sandboxes a namespace may have; 0: any number. A cluster has its own limits, by its nodes.
func sandboxes(cfg *config.Config) int64 {
	if cfg.QuotaSandboxes != config.QuotaByMachine {
		return int64(cfg.QuotaSandboxes)
	}
	if cfg.Role != config.RoleServer {
		return 0
	}
	_, total, err := hostcheck.ReadMemory()
	if err != nil {
		return 0 // the check of the machine reports it
	}
	return max(leastByMachine, total/config.MachineShare)
}

// stored returns how many bytes the snapshots and paused sandboxes of a namespace may have on disk; 0: any number.
func stored(cfg *config.Config) int64 {
	if cfg.QuotaStored.CmpInt64(config.QuotaByMachine) != 0 {
		return cfg.QuotaStored.Value()
	}
	total, err := hostcheck.DiskTotal(cfg.DataDir)
	if err != nil { // the check of the machine reports it
		return config.MachineStored
	}
	return min(config.MachineStored, total/2)
}
