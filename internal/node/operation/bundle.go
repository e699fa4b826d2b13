package operation

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// writeBundle writes all files that the container starts from.
func (w *Operation) writeBundle(ctx context.Context) error {
	p := &w.Row.Plan
	agentDir := w.Path("agent")
	if err := os.MkdirAll(agentDir, 0o755); err != nil {
		return errs.Retryable(fmt.Errorf("create agent directory: %w", err))
	}
	if err := w.linkAgent(w.agentProgram()); err != nil {
		return err
	}
	if err := w.Resolve(ctx); err != nil {
		return err
	}
	cfg, err := w.agentConfig(ctx)
	if err != nil {
		return err
	}
	w.Row.Program = len(cfg.Entrypoint) > 0
	if w.RestoresMemory() { // the restored kernel has cached the files: the agent writes them
		cfg.SystemFiles = w.systemFiles()
	} else if err := w.writeSystemFiles(); err != nil {
		return errs.Retryable(err)
	}
	if err := envd.WriteConfig(w.agentConfigFile(), cfg); err != nil {
		return fmt.Errorf("agent's configuration: %w: %w", err, errs.ErrInvalid)
	}
	if err := w.fillVolumes(ctx); err != nil {
		return err
	}
	if err := w.FillProjected(ctx); err != nil {
		return err
	}
	mounts, err := w.mounts()
	if err != nil {
		return errs.Retryable(err)
	}
	box := oci.Sandbox{
		Class: p.Class, Hostname: p.Hostname, Rootfs: w.Path("rootfs"), NetnsPath: w.host.cfg.Network.NetnsPath(w.ID()), AgentDir: agentDir,
		CgroupsPath: w.host.Cgroup(w.ID()), Env: []string{"PATH=" + plan.DefaultPath}, Mounts: mounts, Limits: p.Limits, Security: p.Security,
		Container: oci.Container{Name: p.Name, Shared: p.SharedMemory()},
	}
	if w.sidecar() != "" { // in the kernel and cgroup of the first container
		box.CgroupsPath, box.Container.Sandbox, box.Container.Shared = "", w.ID(), nil
	}
	return errs.Retryable(oci.WriteBundle(w.Path(""), oci.Spec(box)))
}

// systemFiles are the files in /etc that depend on the network, by path.
func (w *Operation) systemFiles() map[string]string {
	p := &w.Row.Plan
	return p.SystemFiles(w.Row.Address, w.host.Beside(w.Row.Address), p.ResolverText(w.host.sandboxResolvers()))
}

// writeSystemFiles writes them into the root filesystem, before any process of the sandbox runs.
func (w *Operation) writeSystemFiles() error {
	return plan.WriteSystemFiles(w.Path("rootfs"), w.systemFiles())
}

func (w *Operation) mounts() (mounts []oci.Mount, err error) {
	for i, v := range w.Row.Plan.Volumes {
		m := oci.Mount{Target: v.Target, ReadOnly: v.ReadOnly, SizeLimit: v.SizeLimit, Shared: v.Memory}
		switch {
		case v.Volume != "":
			m.Source, err = w.host.cfg.Volumes.Source(types.NamespacedName{Namespace: w.Row.Plan.Ref.Namespace, Name: v.Volume})
		case v.Projected != "" && v.SubPath != "":
			m.Source = w.subPathCopy(i)
		case v.Projected != "":
			m.Source = w.projectedVolume(v.Projected)
		case v.Claim != "", v.Scratch != "":
			m.Source, err = disk.Directory(w.VolumeSource(v), v.SubPath)
		}
		if err != nil {
			return nil, err
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

// agentConfig is the agent's configuration at start.
func (w *Operation) agentConfig(ctx context.Context) (*envd.Config, error) {
	env, err := w.environment(ctx, nil)
	if err != nil {
		return nil, err
	}
	cfg, err := w.Row.Plan.AgentConfig(w.Image, env, w.sidecar())
	if err == nil {
		w.setAgentToken(cfg)
	}
	return cfg, err
}
