// Package quotas derives the quotas of namespaces without their own from the settings and the machine.
package quotas

import (
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

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
		Volumes: limit(int64(cfg.QuotaVolumes)), VolumeCapacity: limit(cfg.QuotaVolumeCapacity.Value()), Stored: limit(stored(cfg)), Contents: limit(cfg.QuotaContents.Value()),
		Memory: limit(cfg.QuotaMemory.Value()), CountPaused: cfg.QuotaCounts == config.QuotaAll,
		Objects: [...]quota.Limit{
			quota.Templates: limit(int64(cfg.QuotaTemplates)), quota.Snapshots: limit(int64(cfg.QuotaSnapshots)), quota.Builds: limit(int64(cfg.QuotaBuilds)),
			quota.Webhooks: limit(int64(cfg.QuotaWebhooks)), quota.Keys: limit(int64(cfg.QuotaKeys)),
		},
	}
}

// Texts returns the defaults that are limits, keyed by the part of the annotation after `quota-`, in the format of the annotation.
func Texts(cfg *config.Config) map[string]string {
	l, texts := Defaults(cfg), map[string]string{}
	add := func(annotation string, l quota.Limit, text string) {
		if l.Set {
			texts[strings.TrimPrefix(annotation, quota.AnnotationPrefix)] = text
		}
	}
	count := func(annotation string, l quota.Limit) { add(annotation, l, strconv.FormatInt(l.Most, 10)) }
	bytes := func(annotation string, l quota.Limit) {
		add(annotation, l, resource.NewQuantity(l.Most, resource.BinarySI).String())
	}
	count(quota.AnnotationSandboxes, l.Sandboxes)
	count(quota.AnnotationCreates, l.Creates)
	count(quota.AnnotationVolumes, l.Volumes)
	add(quota.AnnotationCPU, l.MilliCPU, resource.NewMilliQuantity(l.MilliCPU.Most, resource.DecimalSI).String())
	bytes(quota.AnnotationMemory, l.Memory)
	bytes(quota.AnnotationVolumeCapacity, l.VolumeCapacity)
	bytes(quota.AnnotationStored, l.Stored)
	bytes(quota.AnnotationContents, l.Contents)
	for _, kind := range quota.Kinds() {
		count(kind.Annotation(), l.Objects[kind])
	}
	return texts
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
