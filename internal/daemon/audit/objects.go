// Package audit compares the places that hold the state of sandboxes: objects, the node's journal and host, routes, files.
//
// It changes nothing but [SweepFiles], and reports only what two passes in a row find, because state moves during a pass.
package audit

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/node"
)

const (
	// auditApart is the time between the two passes.
	auditApart = time.Second
	// longGone is how long an object may take to go that is being deleted.
	longGone = 2 * time.Minute
)

// Remedies of findings.
const (
	remedyMachine = "restart the server, which undoes what was left half done; `barchan down --all` removes everything"
	remedyRow     = "the server reads the object by name, every 5 minutes and at its start, and removes the sandbox if it is deleted"
	remedyObject  = "see the server's log; `kubectl delete` the object to give it up"
	remedyRoute   = "restart the server, which rebuilds its routes"
	remedyFile    = "a write was interrupted; delete the file"
)

// Server is a server that is ready.
type Server struct {
	// Live reads from the API server itself.
	Live client.Reader
	// Node is nil where no sandboxes run, and Routes where no requests are routed: these are not compared then.
	Node   *node.Node
	Routes *route.Table
	Config *config.Config
}

// Run returns what two passes over the server both find.
func (a Server) Run(ctx context.Context) ([]adminclient.Finding, error) { return twice(ctx, a.pass) }

// twice makes two passes and returns what both find.
func twice(ctx context.Context, pass func(context.Context) ([]adminclient.Finding, error)) ([]adminclient.Finding, error) {
	first, err := pass(ctx)
	if err != nil || len(first) == 0 {
		return nil, err
	}
	select {
	case <-time.After(auditApart):
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the second pass of the audit: %w", context.Cause(ctx))
	}
	second, err := pass(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(second, func(f adminclient.Finding) bool { return !slices.Contains(first, f) }), nil
}

// pass compares everything once.
func (a Server) pass(ctx context.Context) ([]adminclient.Finding, error) {
	v, err := a.view(ctx)
	if err != nil {
		return nil, err
	}
	found := v.claims()
	if a.Routes != nil {
		found = append(found, v.compareRoutes()...)
	}
	if a.Node == nil {
		stray, err := files(a.Config)
		return append(found, stray...), err
	}
	left, err := Machine(ctx, a.Node, a.Config)
	if err != nil {
		return nil, err
	}
	kept, err := a.checkpoints(ctx, v.now)
	if err != nil {
		return nil, err
	}
	unowned, err := a.volumes(ctx)
	if err != nil {
		return nil, err
	}
	return slices.Concat(left, found, v.sandboxes(), kept, unowned), nil
}

// Machine compares what needs no objects. It also returns its findings with an error.
func Machine(ctx context.Context, n *node.Node, cfg *config.Config) (found []adminclient.Finding, err error) {
	left, failure := n.Audit(ctx)
	if failure != nil {
		failure = fmt.Errorf("inspect the machine: %w", failure)
	}
	for _, what := range left {
		found = append(found, adminclient.Finding{Where: adminclient.OnMachine, What: what, Remedy: remedyMachine})
	}
	stray, err := files(cfg)
	return append(found, stray...), errors.Join(failure, err)
}

// files are the stray files as findings.
func files(cfg *config.Config) (found []adminclient.Finding, err error) {
	stray, err := strayFiles(cfg)
	for _, what := range stray {
		found = append(found, adminclient.Finding{Where: adminclient.InFiles, What: what, Remedy: remedyFile})
	}
	return found, err
}

// strayFiles finds leftovers of interrupted writes in the data directory, except in the directories of sandboxes, etcd and
// containerd, of volumes, whose files are their tenants', of template builds, which their store checks, and of memory on disk, which the node checks.
func strayFiles(cfg *config.Config) (stray []string, err error) {
	notOurs := []string{
		filepath.Join(cfg.DataDir, "containerd"), filepath.Join(cfg.DataDir, "apiserver", "etcd"), filepath.Join(cfg.DataDir, "node", "memory"),
		filepath.Join(cfg.DataDir, "node", "sandboxes"), filepath.Join(cfg.DataDir, "node", "claims"), filepath.Join(cfg.DataDir, "node", "volumes"),
		filepath.Join(cfg.DataDir, "node", "checkpoints"), filepath.Join(cfg.DataDir, "node", "encrypted"), filepath.Join(cfg.DataDir, "builds"), filepath.Join(cfg.DataDir, "events"), cfg.RunDir, cfg.CacheDir,
		filepath.Join(cfg.DataDir, "server"), // of a process of its own, which checks it
	}
	err = filepath.WalkDir(cfg.DataDir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // it was removed meanwhile
			return nil
		case err != nil:
			return err
		case d.IsDir() && slices.Contains(notOurs, path):
			return fs.SkipDir
		case !d.IsDir() && (strings.HasPrefix(d.Name(), ".") || strings.HasSuffix(d.Name(), ".tmp") || strings.HasSuffix(d.Name(), ".new")):
			stray = append(stray, path)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("walk the data directory: %w", err)
	}
	return stray, nil
}

// halfWritten are the names that files have until they are whole; see package durable.
var halfWritten = regexp.MustCompile(`^\..+-[0-9]+$`)

// SweepFiles removes leftovers of interrupted writes from the data directory. No process may write there meanwhile.
func SweepFiles(cfg *config.Config) error {
	stray, err := strayFiles(cfg)
	for _, path := range stray {
		if halfWritten.MatchString(filepath.Base(path)) {
			err = errors.Join(err, os.Remove(path))
		}
	}
	return err
}

// view is all that is compared, as it was at about one moment.
type view struct {
	table     *route.Table
	now       time.Time
	boxes     map[types.UID]*agents.Sandbox
	named     map[client.ObjectKey]*agents.Sandbox
	pools     map[types.UID]bool
	claimList []extensions.SandboxClaim
	onNode    map[types.UID]node.Status
}

// view reads the objects from the API server itself.
func (a Server) view(ctx context.Context) (*view, error) {
	v := &view{
		table: a.Routes, now: time.Now(), boxes: map[types.UID]*agents.Sandbox{}, named: map[client.ObjectKey]*agents.Sandbox{},
		pools: map[types.UID]bool{}, onNode: map[types.UID]node.Status{},
	}
	var boxes agents.SandboxList
	var pools extensions.SandboxWarmPoolList
	var claims extensions.SandboxClaimList
	for _, list := range []client.ObjectList{&boxes, &pools, &claims} {
		if err := a.Live.List(ctx, list); err != nil {
			return nil, fmt.Errorf("list objects: %w", err)
		}
	}
	for i := range boxes.Items {
		s := &boxes.Items[i]
		v.boxes[s.UID], v.named[client.ObjectKeyFromObject(s)] = s, s
	}
	for i := range pools.Items {
		v.pools[pools.Items[i].UID] = true
	}
	v.claimList = claims.Items
	if a.Node == nil {
		return v, nil
	}
	rows, err := a.Node.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the node's sandboxes: %w", err)
	}
	for _, r := range rows {
		if r.Observed.State != sandbox.ContainerAbsent {
			v.onNode[r.Ref.UID] = r
		}
	}
	return v, nil
}

// full is how a name is written.
func full(o client.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// sandboxes compares objects with what the node has.
func (v *view) sandboxes() (found []adminclient.Finding) {
	add := func(remedy, text string, args ...any) {
		found = append(found, adminclient.Finding{Where: adminclient.InObjects, What: fmt.Sprintf(text, args...), Remedy: remedy})
	}
	for _, s := range v.boxes {
		phase := sandbox.PhaseOf(s)
		_, there := v.onNode[s.UID]
		switch {
		case s.DeletionTimestamp != nil && v.now.Sub(s.DeletionTimestamp.Time) > longGone:
			add(remedyObject, "sandbox %s is being deleted since %s and is held by %v", full(s), s.DeletionTimestamp.UTC().Format(time.RFC3339), s.Finalizers)
		case !there && (phase == sandbox.Running || phase == sandbox.Pausing || phase == sandbox.Paused || phase == sandbox.Resuming):
			add(remedyObject, "sandbox %s is %s by its object, and the node does not have it", full(s), phase)
		case there && !slices.Contains(s.Finalizers, agents.NodeFinalizer):
			add(remedyObject, "sandbox %s is on the node, and nothing holds its object", full(s))
		}
		if v.poolless(s) {
			add(remedyObject, "sandbox %s is a member of a warm pool that does not exist", full(s))
		}
	}
	for uid, r := range v.onNode {
		if v.boxes[uid] == nil {
			add(remedyRow, "sandbox %s/%s is on the node, and its object %s is gone", r.Ref.Namespace, r.Ref.Name, uid)
		}
	}
	return found
}

// poolless reports whether a sandbox is a member of a pool that does not exist.
func (v *view) poolless(s *agents.Sandbox) bool {
	uid := pool.MemberOf(s)
	return uid != "" && !pool.IsInternal(s) && !v.pools[uid]
}

// claims compares claims with the sandboxes that they name, and owned sandboxes with their claims.
func (v *view) claims() (found []adminclient.Finding) {
	add := func(text string, args ...any) {
		found = append(found, adminclient.Finding{Where: adminclient.InObjects, What: fmt.Sprintf(text, args...), Remedy: remedyObject})
	}
	known := map[types.UID]bool{}
	for i := range v.claimList {
		c := &v.claimList[i]
		known[c.UID] = true
		name := c.Status.Sandbox.Name
		if name == "" || c.DeletionTimestamp != nil {
			continue
		}
		s := v.named[client.ObjectKey{Namespace: c.Namespace, Name: name}]
		if s == nil && ready(c) {
			add("claim %s is ready with sandbox %s, which does not exist", full(c), name)
		} else if s != nil && !metav1.IsControlledBy(s, c) {
			add("claim %s names sandbox %s, which is not its own", full(c), name)
		}
	}
	for _, s := range v.boxes {
		if owner := metav1.GetControllerOf(s); owner != nil && owner.Kind == "SandboxClaim" && !known[owner.UID] {
			add("sandbox %s belongs to claim %s, which does not exist", full(s), owner.Name)
		}
	}
	return found
}

// ready reports whether a claim's status has its sandbox.
func ready(c *extensions.SandboxClaim) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(x metav1.Condition) bool {
		return x.Type == agents.ConditionReady && x.Status == metav1.ConditionTrue
	})
}

// compareRoutes compares routes with objects.
func (v *view) compareRoutes() (found []adminclient.Finding) {
	add := func(text string, args ...any) {
		found = append(found, adminclient.Finding{Where: adminclient.InRoutes, What: fmt.Sprintf(text, args...), Remedy: remedyRoute})
	}
	routed := map[types.UID]route.Route{}
	for r := range v.table.All() {
		routed[r.UID] = r
		if v.boxes[r.UID] == nil {
			add("route of sandbox %s remains without an object", r.ID)
		}
	}
	for uid, s := range v.boxes {
		want, keep := route.FromSandbox(s)
		r, has := routed[uid]
		switch {
		case keep && !has:
			add("sandbox %s has no route", full(s))
		case !keep && has:
			add("sandbox %s must have no route, and has one", full(s))
		case keep && (r.Address != want.Address || r.State != want.State):
			add("route of sandbox %s goes to %v, %s; it is at %v, %s", full(s), r.Address, r.State, want.Address, want.State)
		}
	}
	return found
}
