package operation

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// Sidecars run in the kernel that the first container brings, with its cgroup and network. Each has an agent of its own as
// first process, which starts its program, and starts it again. So a restart of a program changes nothing on the host.

// sidecar is the name of the operation's container, if it is a sidecar.
func (w *Operation) sidecar() string {
	name, _ := strings.CutPrefix(w.part, ctrd.SidecarPart)
	if name == w.part {
		return ""
	}
	return name
}

// containerID is the runtime's ID of the container.
func (w *Operation) containerID() string {
	if name := w.sidecar(); name != "" {
		return oci.ContainerID(w.ID(), name)
	}
	return w.ID()
}

// eachSidecar does something for all sidecars, in their order, until an error.
func (w *Operation) eachSidecar(ctx context.Context, do func(*Operation, context.Context) error) error {
	all := w.Row.Plan.Sidecars
	for i := range all {
		one := w.other(&all[i], ctrd.ContainerPart(all[i].Name))
		one.Row.ContainerImage = w.Row.ImageOf(all[i].Name)
		err := do(one, ctx)
		one.closeConsole()
		if err != nil {
			return fmt.Errorf("container %s: %w", all[i].Name, err)
		}
	}
	return nil
}

// makeSidecars makes the files of all sidecars from their images or their checkpoint.
func (w *Operation) makeSidecars(ctx context.Context) error {
	made := map[string]plan.ContainerImage{}
	err := w.eachSidecar(ctx, func(one *Operation, ctx context.Context) error {
		if err := one.makeFiles(ctx); err != nil {
			return err
		}
		made[one.sidecar()] = one.Row.ContainerImage
		return nil
	})
	if len(made) > 0 {
		w.Row.Sidecars = made
	}
	return err
}

// startSidecars starts all sidecars. The sandbox runs; one that was restored has them.
func (w *Operation) startSidecars(ctx context.Context) error {
	if w.RestoresMemory() {
		return nil
	}
	return w.eachSidecar(ctx, func(one *Operation, ctx context.Context) error {
		if err := one.start(ctx); err != nil {
			return err
		}
		return one.awaitAgent(ctx)
	})
}

// restartSidecars starts all sidecars again from their files.
func (w *Operation) restartSidecars(ctx context.Context) error {
	err := w.eachSidecar(ctx, func(one *Operation, ctx context.Context) error {
		return errors.Join(one.remount(ctx), one.readdress(ctx))
	})
	if err != nil {
		return err
	}
	return w.startSidecars(ctx)
}

// removeSidecars removes the files of all sidecars. Those of a sandbox without a row are found by their snapshots, which are
// made first.
func (w *Operation) removeSidecars(ctx context.Context) error {
	var failures []error
	for _, c := range w.Row.Plan.Sidecars {
		failures = append(failures, w.removePart(ctx, ctrd.ContainerPart(c.Name)))
	}
	if w.Row.Plan.Class != "" {
		return errors.Join(failures...)
	}
	keys, err := w.host.cfg.Containerd.Snapshots(ctx)
	for _, key := range keys {
		if id, part := ctrd.SandboxOf(key); id == w.ID() && part != "" {
			failures = append(failures, w.removePart(ctx, part))
		}
	}
	return errors.Join(append(failures, err)...)
}
