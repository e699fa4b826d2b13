package adminops

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/daemon/audit"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/nodesocket"
	"github.com/barchan-dev/barchan/internal/daemon/quotas"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
)

// Status describes the server at this moment, also during the boot.
func (s Server) Status(ctx context.Context) (adminclient.Status, error) {
	status, err := s.ownStatus(ctx)
	if s.cfg.Process == nil || err != nil {
		return status, err
	}
	return s.withServer(ctx, status), nil
}

func (s Server) ownStatus(ctx context.Context) (adminclient.Status, error) {
	ready, current, all := s.cfg.Progress.Snapshot()
	cfg, early := s.cfg.Config, s.cfg.Early()
	status := adminclient.Status{
		Version: s.cfg.Version, PID: os.Getpid(), Node: cfg.NodeName, Role: cfg.Role, StartedAt: s.cfg.Started,
		Ready: ready, Phase: current, DataDir: cfg.DataDir, Sandboxes: map[string]int{}, Quotas: quotas.Texts(cfg),
		Addresses: adminclient.Addresses{
			HTTP: early.HTTP, TLS: early.TLS, SSH: early.SSH, CAFile: early.CAFile, Domain: cfg.Domain(),
			Kubeconfig: cfg.Kubeconfig(), APIKeyFile: cfg.APIKeyFile(), Kube: cfg.KubeAddr,
		},
	}
	for _, p := range all {
		status.Phases = append(status.Phases, adminclient.Phase{Name: p.Name, Done: p.Done, Milli: float64(p.Took.Microseconds()) / 1000})
	}
	status.Conditions, status.Certificates = hostcheck.Conditions(s.cfg.Gate), certificates(early.ACME)
	if !ready { // phases may still write what follows
		return status, nil
	}
	parts := s.cfg.Ready()
	status.Addresses.Kube, status.Addresses.Kubeconfig = parts.Kube, parts.Kubeconfig
	phases, err := parts.phases(ctx)
	if err != nil {
		return status, err
	}
	for phase, n := range phases {
		status.Sandboxes[string(phase)] = n
	}
	switch {
	case parts.Machine != nil:
		status.Components = parts.Machine.Components(ctx)
	case parts.Apart != nil:
		node := adminclient.Component{Name: "node", State: "away", Path: s.cfg.Config.NodeSocket}
		if state, err := parts.Apart.State(ctx); err == nil {
			node.State, node.Version, node.Path = "running", state.Version, state.DataDir
		}
		status.Components = []adminclient.Component{node}
	}
	if parts.Peers != nil {
		for _, m := range parts.Peers.Members() {
			status.Peers = append(status.Peers, adminclient.Peer{Name: m.Name, Gossip: m.Gossip.String(), Push: m.Push.String()})
		}
	}
	return status, nil
}

// phases returns the number of sandboxes in each phase.
func (p *Parts) phases(ctx context.Context) (map[sandbox.Phase]int, error) {
	if p.Phases != nil {
		return p.Phases.Counts(), nil
	}
	list, err := p.Cache.Sandboxes(ctx, "")
	counts := map[sandbox.Phase]int{}
	for _, s := range list {
		counts[sandbox.PhaseOf(s)]++
	}
	return counts, err
}

// Doctor checks the machine of a running server, also during the boot.
func (s Server) Doctor(ctx context.Context) ([]adminclient.Check, error) {
	certificates := checkCertificates(s.cfg.Early().ACME)
	list := append(hostcheck.Checks(s.cfg.Gate), certificates...)
	if s.cfg.Config.Role != config.RoleServer {
		list = append(s.checkAPI(ctx), list...)
	}
	if s.cfg.Process != nil {
		list = append(list, s.checkServer(ctx)...)
	}
	if s.cfg.Config.RunsSandboxes() {
		list = append(list, Doctor(ctx, *s.cfg.Config, false)...)
	} else if parts, err := s.ready(); err == nil && parts.Apart != nil {
		list = append(list, checkApart(ctx, parts.Apart))
	}
	return list, nil
}

// checkApart reports whether a server's node answers. What it lacks is among the conditions.
func checkApart(ctx context.Context, node *nodesocket.Client) adminclient.Check {
	state, err := node.State(ctx)
	if err != nil {
		return adminclient.Check{Name: "node", State: adminclient.CheckFailed, Detail: errs.Text(err), Remedy: "start it, as root, with `barchan up --role node`"}
	}
	return adminclient.Check{Name: "node", State: adminclient.CheckOK, Detail: state.Version + " at " + state.DataDir}
}

// checkAPI reports whether the API server that a replica or controller uses answers.
func (s Server) checkAPI(ctx context.Context) []adminclient.Check {
	check := adminclient.Check{Name: "API server", State: adminclient.CheckOK}
	remedy := "see apiKubeconfig, " + s.cfg.Config.APIKubeconfig
	if ready, current, _ := s.cfg.Progress.Snapshot(); !ready {
		check.State, check.Detail, check.Remedy = adminclient.CheckFailed, "the "+s.cfg.Config.Role+" is not ready ("+current+")", remedy
		return []adminclient.Check{check}
	}
	parts := s.cfg.Ready()
	check.Detail = parts.Kube
	if err := parts.Cache.Live().List(ctx, &agents.SandboxList{}, client.Limit(1)); err != nil {
		check.State, check.Detail, check.Remedy = adminclient.CheckFailed, errs.Text(err), remedy
	}
	return []adminclient.Check{check}
}

// Stop ends the server.
func (s Server) Stop() { s.cfg.Stop() }

// Prepare deletes every sandbox through the API if requested.
func (s Server) Prepare(ctx context.Context, req adminclient.ShutdownRequest, progress func(adminclient.Event)) error {
	if !req.All || s.cfg.Config.Role != config.RoleServer && s.cfg.Process == nil { // it has no sandboxes to remove
		return nil
	}
	parts, err := s.ready()
	if err != nil {
		return err
	}
	list, err := parts.Cache.Sandboxes(ctx, "")
	if err != nil {
		return err
	}
	for i := range list {
		if err := client.IgnoreNotFound(parts.Cache.Live().Delete(ctx, list[i])); err != nil {
			return fmt.Errorf("delete sandbox %s/%s: %w", list[i].Namespace, list[i].Name, err)
		}
	}
	for i := range list {
		progress(adminclient.Event{Step: "remove sandboxes", Done: int64(i), Total: int64(len(list))})
		gone := func(s *agents.Sandbox) (bool, error) { return s == nil || s.UID != list[i].UID, nil }
		if err := awaitGone(ctx, parts.Cache, client.ObjectKeyFromObject(list[i]), gone); err != nil {
			return fmt.Errorf("remove sandbox %s/%s: %w", list[i].Namespace, list[i].Name, err)
		}
		progress(adminclient.Event{Step: "removed", Message: "sandbox " + list[i].Namespace + "/" + list[i].Name})
	}
	return nil
}

// goneWithin is how long the removal of one sandbox may take, once those before it are gone.
const goneWithin = time.Minute

func awaitGone(ctx context.Context, objects *cache.Cache, key client.ObjectKey, gone func(*agents.Sandbox) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, goneWithin)
	defer cancel()
	_, err := objects.WaitSandbox(ctx, key, gone)
	if errors.Is(err, errs.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("it is still there after %s; `kubectl describe sandbox -n %s %s` and the server's log show why: %w", goneWithin, key.Namespace, key.Name, errs.ErrTimeout)
	}
	return err
}

// Doctor reports whether this machine can run a server. fresh: no server runs yet, so its addresses must be free.
func Doctor(ctx context.Context, cfg config.Config, fresh bool) []adminclient.Check {
	opts := toolchain.Options{DataDir: cfg.DataDir}
	if fresh {
		opts.Addresses = []string{cfg.HTTPAddr, cfg.KubeAddr}
		for _, optional := range []string{cfg.TLSAddr, cfg.SSHAddr} {
			if optional != "" {
				opts.Addresses = append(opts.Addresses, optional)
			}
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

// Audit compares the places that hold the state of sandboxes.
func (s Server) Audit(ctx context.Context) ([]adminclient.Finding, error) {
	p, err := s.own(ctx)
	if err != nil && p.Apart == nil {
		return nil, err
	}
	a := audit.Server{Live: p.Cache.Live(), Config: s.cfg.Config}
	if p.Machine != nil {
		a.Node = p.Machine.Node
	}
	if s.cfg.Config.ServesTraffic() {
		a.Routes = p.Routes
	}
	found, err := a.Run(ctx)
	if s.cfg.Process == nil || err != nil {
		return found, err
	}
	more, err := s.cfg.Process.Admin().Audit(ctx)
	return append(found, more...), err
}
