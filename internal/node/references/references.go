// Package references reads what a plan takes from Secrets and ConfigMaps: variables and the files of volumes. It writes
// nothing: package operation does. It keeps no values and has no locks.
package references

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// Values are those of one sandbox. They must not be written to its row.
type Values struct {
	Env     podsource.Variables
	Volumes map[string]map[string]podsource.File // by volume and path
}

// None is a podsource.Objects without any.
type None struct{}

// Secret implements podsource.Objects.
func (None) Secret(context.Context, string, string) (*corev1.Secret, error) { return nil, nil }

// ConfigMap implements podsource.Objects.
func (None) ConfigMap(context.Context, string, string) (*corev1.ConfigMap, error) { return nil, nil }

// Reader reads the values for the sandboxes of a node.
type Reader struct {
	Objects podsource.Objects
	// Node is the node's name, for variables that refer to it.
	Node string
	Log  *slog.Logger
}

// Env reads the variables of a plan. What is missing is a *podsource.Missing.
func (r Reader) Env(ctx context.Context, p *plan.Plan) (podsource.Variables, error) {
	if !p.RefersToObjects() {
		return podsource.Variables{}, nil
	}
	v, err := podsource.Resolve(ctx, r.Objects, p.Ref.Namespace, p.Env, p.EnvFrom)
	return v, unlessMissing(err)
}

// Volumes reads the files of a plan's volumes, of a sandbox at an address.
func (r Reader) Volumes(ctx context.Context, p *plan.Plan, address netip.Addr) (map[string]map[string]podsource.File, error) {
	all, size := map[string]map[string]podsource.File{}, 0
	for i := range p.Projections {
		v := &p.Projections[i]
		files, err := podsource.Files(ctx, r.Objects, p.Ref.Namespace, v.Name, &v.Source, p.Fields(address, r.Node))
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

// EnvOr is Env, but where the values cannot be read they are those of a former environment, if there is one, so that a
// sandbox can start again without an object that is gone.
func (r Reader) EnvOr(ctx context.Context, p *plan.Plan, former map[string]string) (podsource.Variables, error) {
	values, err := r.Env(ctx, p)
	if err == nil || former == nil {
		return values, err
	}
	r.Log.WarnContext(ctx, "variables from objects not read; sandbox keeps its values", telemetry.Sandbox, p.Ref.Name, telemetry.Error, err)
	values = podsource.Variables{From: maps.Clone(former), Keys: map[int]string{}}
	for i, e := range p.Env {
		if value, had := former[e.Name]; had {
			values.Keys[i] = value
		}
	}
	return values, nil
}
