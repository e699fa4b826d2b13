package operation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/projection"
)

// noObjects is a podsource.Objects without any.
type noObjects struct{}

func (noObjects) Secret(context.Context, string, string) (*corev1.Secret, error) { return nil, nil }

func (noObjects) ConfigMap(context.Context, string, string) (*corev1.ConfigMap, error) {
	return nil, nil
}

// resolved has the values that a sandbox takes from objects. They are never in its row.
type resolved struct {
	env     podsource.Variables
	volumes map[string]map[string]podsource.File // by volume and path
}

// Resolve reads what the environment and the volumes need of Secrets and ConfigMaps. What is missing is a
// *podsource.Missing: the sandbox can be created when it appears.
func (w *Operation) Resolve(ctx context.Context) (err error) {
	if w.resolved != nil {
		return nil
	}
	found := &resolved{}
	if found.volumes, err = w.resolveVolumes(ctx); err != nil {
		return err
	}
	if found.env, err = w.resolveEnv(ctx); err != nil {
		return err
	}
	for i := range w.Row.Plan.Init { // all that is missing is known before anything runs
		if _, err = w.initContainer(i).resolveEnv(ctx); err != nil {
			return err
		}
	}
	w.resolved = found
	return nil
}

func (w *Operation) resolveEnv(ctx context.Context) (podsource.Variables, error) {
	p := &w.Row.Plan
	if !p.RefersToObjects() {
		return podsource.Variables{}, nil
	}
	v, err := podsource.Resolve(ctx, w.host.cfg.Objects, p.Ref.Namespace, p.Env, p.EnvFrom)
	return v, unlessMissing(err)
}

func (w *Operation) resolveVolumes(ctx context.Context) (map[string]map[string]podsource.File, error) {
	p := &w.Row.Plan
	all, size := map[string]map[string]podsource.File{}, 0
	for i := range p.Projections {
		v := &p.Projections[i]
		files, err := podsource.Files(ctx, w.host.cfg.Objects, p.Ref.Namespace, v.Name, &v.Source, p.Fields(w.Row.Address, w.host.cfg.Name))
		if err != nil {
			return nil, unlessMissing(err)
		}
		for _, f := range files {
			size += len(f.Data)
		}
		all[v.Name] = files
	}
	if size > podsource.MaxVolumeBytes {
		return nil, fmt.Errorf("spec.podTemplate.spec.volumes: the Secrets and ConfigMaps of a sandbox may have %d MiB, and these have more: %w",
			podsource.MaxVolumeBytes>>20, errs.ErrInvalid)
	}
	return all, nil
}

// unlessMissing lets the read of an object be repeated. What is missing is waited for instead.
func unlessMissing(err error) error {
	if missing, ok := errors.AsType[*podsource.Missing](err); ok {
		return missing
	}
	return errs.Retryable(err)
}

// environment is that of the container now. Values that cannot be read are those of a former environment, so that a
// sandbox can start again without an object that is gone.
func (w *Operation) environment(ctx context.Context, former map[string]string) (map[string]string, error) {
	p := &w.Row.Plan
	var values podsource.Variables
	switch {
	case w.resolved != nil:
		values = w.resolved.env
	default:
		var err error
		values, err = w.resolveEnv(ctx)
		if err != nil && former == nil {
			return nil, err
		}
		if err != nil {
			w.host.cfg.Log.WarnContext(ctx, "variables from objects not read; sandbox keeps its values", telemetry.Sandbox, p.Ref.Name, telemetry.Error, err)
			values = podsource.Variables{From: maps.Clone(former), Keys: map[int]string{}}
			for i, e := range p.Env {
				if value, had := former[e.Name]; had {
					values.Keys[i] = value
				}
			}
		}
	}
	return p.Environment(w.Row.ImageEnv, w.Row.Address, w.host.cfg.Name, values), nil
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
		volumes = w.resolved.volumes
	} else if volumes, err = w.resolveVolumes(ctx); err != nil {
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
	return filepath.Join(w.projectedDir(), "subpaths", strconv.Itoa(w.init), strconv.Itoa(mount))
}

// projectedSource is the host path of a mount of a projected volume.
func (w *Operation) projectedSource(i int, v plan.Volume) string {
	if v.SubPath != "" {
		return w.subPathCopy(i)
	}
	return w.projectedVolume(v.Projected)
}
