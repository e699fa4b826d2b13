package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/audit"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
)

// administration is what the admin API asks of the server.
type administration struct{ *Daemon }

func (d *Daemon) makeAdmin() (err error) {
	d.admin, err = adminapi.New(adminapi.Config{
		Socket: d.cfg.AdminSocket(), Server: administration{d}, Images: imageStore{d}, Base: imageStore{d}, Log: d.cfg.Log,
		Audit: administration{d}.Audit, Addresses: network{d}, Egress: network{d}, Peers: gossip{d},
		Checkpoints: transfers{d},
	})
	return err
}

// Status tells of the server at this moment; it may be asked for during the boot.
func (a administration) Status(ctx context.Context) (adminclient.Status, error) {
	ready, current, all := a.progress.Snapshot()
	status := adminclient.Status{
		Version: a.cfg.Version, PID: os.Getpid(), Node: a.cfg.NodeName, StartedAt: a.started,
		Ready: ready, Phase: current, DataDir: a.cfg.DataDir, Sandboxes: map[string]int{},
		Addresses: adminclient.Addresses{
			HTTP: a.plain.listener.Addr().String(), Domain: a.cfg.Domain(),
			Kubeconfig: a.cfg.Kubeconfig(), APIKeyFile: a.cfg.APIKeyFile(), Kube: a.cfg.KubeAddr,
		},
	}
	for _, p := range all {
		status.Phases = append(status.Phases, adminclient.Phase{Name: p.Name, Done: p.Done, Milli: float64(p.Took.Microseconds()) / 1000})
	}
	if a.secure != nil {
		status.Addresses.TLS = a.secure.listener.Addr().String()
	}
	if a.ca != nil {
		status.Addresses.CAFile = a.ca.CertPath()
	}
	status.Conditions, status.Certificates = hostcheck.Conditions(a.health), issued(a.acme)
	if !ready { // what follows is written by phases that may still run
		return status, nil
	}
	if a.api == nil {
		status.Addresses.Kube, status.Addresses.Kubeconfig = a.rest.Host, a.cfg.APIKubeconfig
	}
	if a.api != nil && a.api.Addr() != nil {
		status.Addresses.Kube = a.api.Addr().String()
	}
	list, err := a.cache.Sandboxes(ctx, "")
	if err != nil {
		return status, err
	}
	for i := range list {
		status.Sandboxes[string(sandbox.PhaseOf(&list[i]))]++
	}
	if a.machine != nil {
		status.Components = a.machine.Components(ctx)
	}
	if a.peers != nil {
		for _, m := range a.peers.Members() {
			status.Peers = append(status.Peers, adminclient.Peer{Name: m.Name, Gossip: m.Gossip.String(), Push: m.Push.String()})
		}
	}
	return status, nil
}

// Doctor checks the machine beneath a server that runs; it may be asked for during the boot.
func (a administration) Doctor(ctx context.Context) ([]adminclient.Check, error) {
	if a.cfg.Role == config.RoleReplica {
		return append(a.checkAPI(ctx), checkIssued(a.acme)...), nil
	}
	return append(append(hostcheck.Checks(a.health), checkIssued(a.acme)...), Doctor(ctx, a.cfg.Config, false)...), nil
}

// checkAPI says whether the API server that a replica serves answers.
func (a administration) checkAPI(ctx context.Context) []adminclient.Check {
	check := adminclient.Check{Name: "API server", State: adminclient.CheckOK}
	if ready, current, _ := a.progress.Snapshot(); !ready { // what follows is written by phases that may still run
		check.State, check.Detail, check.Remedy = adminclient.CheckFailed, "the replica is not ready ("+current+")", "see apiKubeconfig, "+a.cfg.APIKubeconfig
		return []adminclient.Check{check}
	}
	check.Detail = a.rest.Host
	if err := a.cache.Live().List(ctx, &agents.SandboxList{}, client.Limit(1)); err != nil {
		check.State, check.Detail, check.Remedy = adminclient.CheckFailed, errs.Text(err), "see apiKubeconfig, "+a.cfg.APIKubeconfig
	}
	return []adminclient.Check{check}
}

// Stop has Run return.
func (a administration) Stop() { a.stop(errAsked) }

// Prepare removes every sandbox, if all is to go, through the API: as if its user had.
func (a administration) Prepare(ctx context.Context, req adminclient.ShutdownRequest, progress func(adminclient.Event)) error {
	if !req.All || a.cfg.Role == config.RoleReplica { // sandboxes are not a replica's to remove
		return nil
	}
	if ready, current, _ := a.progress.Snapshot(); !ready {
		return fmt.Errorf("the server is not ready (%s): %w", current, errs.ErrUnavailable)
	}
	list, err := a.cache.Sandboxes(ctx, "")
	if err != nil {
		return err
	}
	for i := range list {
		if err := client.IgnoreNotFound(a.cache.Live().Delete(ctx, &list[i])); err != nil {
			return fmt.Errorf("delete sandbox %s/%s: %w", list[i].Namespace, list[i].Name, err)
		}
	}
	for i := range list {
		progress(adminclient.Event{Step: "remove sandboxes", Done: int64(i), Total: int64(len(list))})
		gone := func(s *agents.Sandbox) (bool, error) { return s == nil || s.UID != list[i].UID, nil }
		if err := a.awaitGone(ctx, client.ObjectKeyFromObject(&list[i]), gone); err != nil {
			return fmt.Errorf("remove sandbox %s/%s: %w", list[i].Namespace, list[i].Name, err)
		}
		progress(adminclient.Event{Step: "removed", Message: "sandbox " + list[i].Namespace + "/" + list[i].Name})
	}
	return nil
}

// goneWithin is how long the removal of one sandbox may take, once those before it are gone.
const goneWithin = time.Minute

func (a administration) awaitGone(ctx context.Context, key client.ObjectKey, gone func(*agents.Sandbox) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, goneWithin)
	defer cancel()
	_, err := a.cache.WaitSandbox(ctx, key, gone)
	if errors.Is(err, errs.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("it is still there after %s; `kubectl describe sandbox -n %s %s` and the server's log say why: %w", goneWithin, key.Namespace, key.Name, errs.ErrTimeout)
	}
	return err
}

// Doctor says whether this machine can run a server. fresh means that none runs here yet, so
// that its addresses must be free.
func Doctor(ctx context.Context, cfg config.Config, fresh bool) []adminclient.Check {
	opts := toolchain.Options{DataDir: cfg.DataDir}
	if fresh {
		opts.Addresses = []string{cfg.HTTPAddr, cfg.KubeAddr}
		if cfg.TLSAddr != "" {
			opts.Addresses = append(opts.Addresses, cfg.TLSAddr)
		}
	}
	var out []adminclient.Check
	for _, c := range toolchain.CheckMachine(ctx, opts) {
		out = append(out, adminclient.Check{Name: c.Name, State: checkState(c), Detail: c.Detail, Remedy: c.Fix})
	}
	return append(out, checkPrograms(ctx, cfg)...)
}

func checkState(c toolchain.Check) string {
	switch {
	case c.OK:
		return adminclient.CheckOK
	case c.Optional:
		return adminclient.CheckWarning
	default:
		return adminclient.CheckFailed
	}
}

func checkPrograms(ctx context.Context, cfg config.Config) (out []adminclient.Check) {
	finder, err := machine.FinderOf(&cfg)
	if err != nil {
		return []adminclient.Check{{Name: "programs", State: adminclient.CheckFailed, Detail: err.Error()}}
	}
	for _, name := range toolchain.Programs() {
		check := adminclient.Check{Name: name, State: adminclient.CheckOK}
		if p, err := finder.Check(ctx, name); err != nil {
			check.State, check.Detail = adminclient.CheckFailed, errs.Text(err)
			if name == toolchain.Runc || name == toolchain.Mmdebstrap {
				check.State = adminclient.CheckWarning // gVisor sandboxes run without them
			}
		} else {
			check.Detail = p.Version + " at " + p.Path
		}
		out = append(out, check)
	}
	return out
}

// Audit compares what the server holds in its several places.
func (a administration) Audit(ctx context.Context) ([]adminclient.Finding, error) {
	m, err := a.own()
	if err != nil {
		return nil, err
	}
	return audit.Server{Live: a.cache.Live(), Node: m.Node, Routes: a.routes, Config: &a.cfg.Config}.Run(ctx)
}
