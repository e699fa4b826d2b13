package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// unneeded are plugins of the pinned containerd that images, snapshots and container metadata do
// not need: tasks and shims, other snapshotters, other listeners.
var unneeded = []string{
	"io.containerd.differ.v1.erofs",
	"io.containerd.grpc.v1.mounts",
	"io.containerd.grpc.v1.sandbox-controllers",
	"io.containerd.grpc.v1.sandboxes",
	"io.containerd.grpc.v1.streaming",
	"io.containerd.grpc.v1.tasks",
	"io.containerd.grpc.v1.transfer",
	"io.containerd.http.v1.pprof",
	"io.containerd.image-verifier.v1.bindir",
	"io.containerd.internal.v1.opt",
	"io.containerd.internal.v1.tracing",
	"io.containerd.metrics.v1.grpc-otel",
	"io.containerd.metrics.v1.grpc-prometheus",
	"io.containerd.monitor.container.v1.restart",
	"io.containerd.monitor.task.v1.cgroups",
	"io.containerd.mount-handler.v1.erofs",
	"io.containerd.mount-manager.v1.bolt",
	"io.containerd.nri.v1.nri",
	"io.containerd.runtime.v2.task",
	"io.containerd.sandbox.controller.v1.shim",
	"io.containerd.sandbox.store.v1.local",
	"io.containerd.server.v1.debug",
	"io.containerd.server.v1.grpc-tcp",
	"io.containerd.server.v1.metrics",
	"io.containerd.server.v1.ttrpc",
	"io.containerd.service.v1.tasks-service",
	"io.containerd.shim.v1.manager",
	"io.containerd.snapshotter.v1.blockfile",
	"io.containerd.snapshotter.v1.erofs",
	"io.containerd.snapshotter.v1.native",
	"io.containerd.streaming.v1.manager",
	"io.containerd.tracing.processor.v1.otlp",
	"io.containerd.transfer.v1.local",
	"io.containerd.ttrpc.v1.otelttrpc",
}

func (s *Supervisor) configFile() string { return filepath.Join(s.cfg.Dir, "config.toml") }

// writeConfig writes containerd's configuration before each start, so that an upgraded program
// never reads an old one.
func (s *Supervisor) writeConfig() error {
	for _, dir := range []string{s.cfg.Dir, filepath.Join(s.cfg.Dir, "root"), filepath.Join(s.cfg.Dir, "state")} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("make directory of containerd: %w", err)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "version = 4\nroot = %s\nstate = %s\ndisabled_plugins = [\n",
		strconv.Quote(filepath.Join(s.cfg.Dir, "root")), strconv.Quote(filepath.Join(s.cfg.Dir, "state")))
	for _, p := range unneeded {
		fmt.Fprintf(&b, "  %s,\n", strconv.Quote(p))
	}
	fmt.Fprintf(&b, "]\nimports = []\n[debug]\nlevel = \"warn\"\n[plugins.'io.containerd.server.v1.grpc']\naddress = %s\n",
		strconv.Quote(s.Address()))
	if err := os.WriteFile(s.configFile(), []byte(b.String()), 0o600); err != nil {
		return fmt.Errorf("write configuration of containerd: %w", err)
	}
	return nil
}
