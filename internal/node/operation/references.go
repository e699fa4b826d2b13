package operation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/projection"
	"github.com/barchan-dev/barchan/internal/node/references"
)

// Resolve reads what the environment and the volumes need of Secrets and ConfigMaps. What is missing is a
// *podsource.Missing: the sandbox can be created when it appears.
func (w *Operation) Resolve(ctx context.Context) (err error) {
	if w.resolved != nil {
		return nil
	}
	found, p := &references.Values{}, &w.Row.Plan
	if found.Volumes, err = w.host.values().Volumes(ctx, p, w.Row.Address); err != nil {
		return err
	}
	if found.Env, err = w.host.values().Env(ctx, p); err != nil {
		return err
	}
	for _, list := range [][]plan.Container{p.Init, p.Sidecars} { // all that is missing is known before anything runs
		for i := range list {
			of := p.Of(&list[i])
			if _, err = w.host.values().Env(ctx, &of); err != nil {
				return err
			}
		}
	}
	w.resolved = found
	return nil
}

// environment is that of the container now; former is the one before, nil at first.
func (w *Operation) environment(ctx context.Context, former map[string]string) (env map[string]string, err error) {
	var values podsource.Variables
	if w.resolved != nil {
		values = w.resolved.Env
	} else if values, err = w.host.values().EnvOr(ctx, &w.Row.Plan, former); err != nil {
		return nil, err
	}
	return w.Row.Plan.Environment(w.Row.ImageEnv, w.Row.Address, w.host.cfg.Name, values), nil
}

func (h *Host) values() references.Reader {
	return references.Reader{Objects: h.cfg.Objects, Node: h.cfg.Name, Log: h.cfg.Log}
}

// projectedDir is where the memory of the projected volumes is mounted.
func (w *Operation) projectedDir() string { return w.shared("projected") }

func (w *Operation) projectedVolume(name string) string {
	return filepath.Join(w.projectedDir(), "volumes", name)
}

// FillProjected writes the projected volumes, as a whole each. It changes nothing where nothing has changed.
func (w *Operation) FillProjected(ctx context.Context) error {
	p := &w.Row.Plan
	if len(p.Projections) == 0 {
		return nil
	}
	var volumes map[string]map[string]podsource.File
	var err error
	if w.resolved != nil {
		volumes = w.resolved.Volumes
	} else if volumes, err = w.host.values().Volumes(ctx, p, w.Row.Address); err != nil {
		return err
	}
	if err := projection.Mount(w.projectedDir()); err != nil {
		return errs.Retryable(err)
	}
	for name, files := range volumes {
		if err := projection.Write(w.projectedVolume(name), files, p.Own.Group); err != nil {
			return errs.Retryable(err)
		}
	}
	return w.copySubPaths()
}

// refillProjected fills the volumes of a sandbox that starts again. Those that are still there stay as they are: memory on
// disk may have their files open, and an object may be gone. The node updates them once the sandbox runs.
func (w *Operation) refillProjected(ctx context.Context) error {
	if len(w.Row.Plan.Projections) == 0 || projection.Mounted(w.projectedDir()) {
		return nil
	}
	return w.FillProjected(ctx)
}

// copySubPaths makes the files of mounts with a subPath, which are not updated, as on Kubernetes.
func (w *Operation) copySubPaths() error {
	for i, v := range w.Row.Plan.Volumes {
		if v.Projected == "" || v.SubPath == "" {
			continue
		}
		err := projection.Copy(w.projectedVolume(v.Projected), v.SubPath, w.subPathCopy(i))
		if errors.Is(err, fs.ErrNotExist) {
			return &podsource.Missing{Reason: podsource.ReasonMount, Message: fmt.Sprintf("MountVolume.SetUp failed for volume %q : there is no subPath %q", v.Projected, v.SubPath)}
		}
		if err != nil {
			return errs.Retryable(err)
		}
	}
	return nil
}

func (w *Operation) subPathCopy(mount int) string {
	return filepath.Join(w.projectedDir(), "subpaths", strings.TrimPrefix(w.part, ctrd.InitPart)+strconv.Itoa(w.init), strconv.Itoa(mount))
}
