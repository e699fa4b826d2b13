// Package resources has the commands on objects of the Kubernetes API: pools, templates, keys, and apply.
package resources

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

const (
	// maxPool is the maximum size of a pool.
	maxPool = 1000
	// shownEvents is how many of a pool's latest events are shown.
	shownEvents = 10
)

// PoolCommand returns `barchan pool`.
func PoolCommand(a *app.App) *cobra.Command {
	return app.NounCommand("pool", "Warm pools of ready sandboxes",
		poolCreateCommand(a), poolLsCommand(a), poolScaleCommand(a), poolShowCommand(a),
		a.RemoveCommand("Remove warm pools with their unclaimed sandboxes", app.PoolKind()))
}

func poolLsCommand(a *app.App) *cobra.Command {
	return app.ListCommand(a, app.Lister[extensions.SandboxWarmPool]{
		Short: "List warm pools",
		Long: "List warm pools. READY counts sandboxes of the template's current revision, which alone are handed out;\n" +
			"STATUS is what an incomplete pool waits for.",
		Find: app.AllOf[extensions.SandboxWarmPool](app.PoolsResource),
		Columns: app.Columns[extensions.SandboxWarmPool]{
			Header: []string{"NAMESPACE", "ID", "NAME", "TEMPLATE", "READY", "DESIRED", "REVISION", "UPDATE", "STATUS", "AGE"},
			Row: func(p *extensions.SandboxWarmPool) []string {
				reason, _ := waitsFor(p)
				return []string{
					p.Namespace, app.PoolKind().ID(p), p.Name, templateName(p), fmt.Sprint(readyMembers(p)), fmt.Sprint(desiredMembers(p)),
					terminal.Dash(short(p.Status.CurrentRevision)), strategy(p), reason, terminal.Since(p.CreationTimestamp.Time),
				}
			},
		},
	})
}

// short returns the abbreviated revision.
func short(revision string) string { return revision[:min(len(revision), 10)] }

func templateName(p *extensions.SandboxWarmPool) string {
	key := pool.TemplateOf(p)
	if key.Namespace == p.Namespace {
		return key.Name
	}
	return key.String()
}

func strategy(p *extensions.SandboxWarmPool) string {
	if s := p.Spec.UpdateStrategy; s != nil && s.Type != "" {
		return string(s.Type)
	}
	return string(extensions.UpdateOnReplenish)
}

// desiredMembers is the controller's desired count; before its first reconcile, the specification's.
func desiredMembers(p *extensions.SandboxWarmPool) int32 {
	b := p.Spec.Barchan
	switch {
	case p.Status.Barchan != nil && p.Status.ObservedGeneration >= p.Generation:
		return p.Status.Barchan.DesiredReplicas
	case b != nil && b.Autoscale != nil:
		return b.Autoscale.MinReplicas
	case p.Spec.Replicas != nil:
		return *p.Spec.Replicas
	}
	return 1
}

// readyMembers counts the claimable members.
func readyMembers(p *extensions.SandboxWarmPool) int32 {
	if p.Status.Barchan != nil {
		return p.Status.Barchan.CurrentReadyReplicas
	}
	return p.Status.ReadyReplicas
}

// waitsFor returns why a pool differs from its specification, as a reason and a message; for a full
// pool the reason is "Full", or another of the controller's.
func waitsFor(p *extensions.SandboxWarmPool) (reason, message string) {
	ready := meta.FindStatusCondition(p.Status.Conditions, extensions.PoolReady)
	going := meta.FindStatusCondition(p.Status.Conditions, extensions.PoolProgressing)
	switch {
	case ready != nil && ready.Status != metav1.ConditionTrue:
		return ready.Reason, ready.Message
	case going != nil && going.Status == metav1.ConditionTrue:
		return going.Reason, going.Message
	case ready != nil:
		return ready.Reason, ready.Message
	}
	return "-", "the pool's controller has not looked at it yet"
}

// IsFull reports whether a pool matches its specification and nothing is in progress.
func IsFull(p *extensions.SandboxWarmPool) bool {
	return p.Status.ObservedGeneration >= p.Generation && meta.IsStatusConditionTrue(p.Status.Conditions, extensions.PoolReady) &&
		!meta.IsStatusConditionTrue(p.Status.Conditions, extensions.PoolProgressing)
}

func poolShowCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show POOL", Short: "Show one warm pool, its members and its last events",
		Long: "Show one warm pool, its members and its last events. --json prints the pool's object.",
	}
	a.JSONFlag(cmd)
	return a.ObjectCommand(cmd, func(ctx context.Context, k *app.Kube, namespace, text string) error {
		p, err := app.GetNamed[extensions.SandboxWarmPool](ctx, k, app.PoolKind(), namespace, text)
		if err != nil {
			return err
		}
		if a.JSON {
			return a.ShowObject(ctx, k, app.PoolsResource, p.Namespace, p.Name)
		}
		showPool(a, &p)
		if err := showMembers(ctx, a, k, &p); err != nil {
			return err
		}
		return showEvents(ctx, a, k, &p)
	})
}

func showPool(a *app.App, p *extensions.SandboxWarmPool) {
	line := func(name, text string, args ...any) {
		a.Field(10, name, fmt.Sprintf(text, args...))
	}
	line("Pool", "%s/%s", p.Namespace, p.Name)
	line("Template", "%s", templateName(p))
	line("Revision", "%s", terminal.Dash(p.Status.CurrentRevision))
	line("Update", "%s%s", strategy(p), bounds(p))
	line("Desired", "%d", desiredMembers(p))
	line("Ready", "%d of the current revision; %d ready of %d in all", readyMembers(p), p.Status.ReadyReplicas, p.Status.Replicas)
	if b := p.Status.Barchan; b != nil {
		text := fmt.Sprint(b.ClaimedReplicas)
		if b.LastClaimTime != nil {
			text += ", the last " + terminal.Since(b.LastClaimTime.Time) + " ago"
		}
		line("Claimed", "%s", text)
	}
	if auto := autoscale(p); auto != nil {
		line("Autoscale", "%d to %d, %d%% spare, down to %d after %s without a claim", auto.MinReplicas, auto.MaxReplicas, auto.SparePercent,
			auto.MinReplicas, terminal.Age(time.Duration(auto.IdleSeconds)*time.Second))
	}
	reason, message := waitsFor(p)
	line("Status", "%s", strings.TrimSuffix(reason+": "+message, ": "))
	if len(p.Status.Conditions) == 0 {
		return
	}
	fmt.Fprintln(a.Stdout)
	tab := terminal.NewTable("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE")
	tab.Colour = a.StateColours(1)
	for _, c := range p.Status.Conditions {
		tab.Add(c.Type, string(c.Status), c.Reason, terminal.Since(c.LastTransitionTime.Time), c.Message)
	}
	tab.Write(a.Stdout)
}

func autoscale(p *extensions.SandboxWarmPool) *extensions.PoolAutoscale {
	if p.Spec.Barchan == nil {
		return nil
	}
	return p.Spec.Barchan.Autoscale
}

// bounds describes a pool's limits for replacing members.
func bounds(p *extensions.SandboxWarmPool) string {
	var text string
	if b := p.Spec.Barchan; b != nil && b.MaxSurge != nil {
		text += ", max surge " + b.MaxSurge.String()
	}
	if b := p.Spec.Barchan; b != nil && b.MaxUnavailable != nil {
		text += ", max unavailable " + b.MaxUnavailable.String()
	}
	return text
}

func showMembers(ctx context.Context, a *app.App, k *app.Kube, p *extensions.SandboxWarmPool) error {
	list, err := k.Client.Resource(app.SandboxesResource).Namespace(p.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: labels.Set{agents.LabelWarmPoolSandbox: string(p.UID)}.String(),
	})
	if err != nil || len(list.Items) == 0 {
		return kubeobjects.Error(err)
	}
	fmt.Fprintln(a.Stdout)
	tab := terminal.NewTable("MEMBER", "PHASE", "REVISION", "NODE", "AGE")
	tab.Colour = a.StateColours(1)
	for i := range list.Items {
		s, err := app.Decode[agents.Sandbox](&list.Items[i])
		if err != nil {
			return err
		}
		revision := short(pool.RevisionOf(&s))
		if pool.RevisionFor(&s, pool.TemplateOf(p)) != p.Status.CurrentRevision {
			revision += " (stale)"
		}
		tab.Add(s.Name, string(sandbox.PhaseOf(&s)), revision, terminal.Dash(s.Status.NodeName), terminal.Since(s.CreationTimestamp.Time))
	}
	tab.Write(a.Stdout)
	return nil
}

func showEvents(ctx context.Context, a *app.App, k *app.Kube, p *extensions.SandboxWarmPool) error {
	list, err := app.List[corev1.Event](ctx, k, app.EventsResource, p.Namespace)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(e corev1.Event) bool { return e.InvolvedObject.UID != p.UID })
	if len(list) == 0 {
		return nil
	}
	slices.SortStableFunc(list, func(x, y corev1.Event) int { return lastSeen(&x).Compare(lastSeen(&y)) })
	fmt.Fprintln(a.Stdout)
	tab := terminal.NewTable("EVENT", "TYPE", "AGE", "MESSAGE")
	for i := range list[max(0, len(list)-shownEvents):] {
		e := &list[max(0, len(list)-shownEvents)+i]
		tab.Add(e.Reason, e.Type, terminal.Since(lastSeen(e)), e.Message)
	}
	tab.Write(a.Stdout)
	return nil
}

// lastSeen returns when an event happened; its two APIs use different fields.
func lastSeen(e *corev1.Event) time.Time {
	switch {
	case e.Series != nil:
		return e.Series.LastObservedTime.Time
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// waiting is how a command waits for a pool.
type waiting struct {
	wanted  bool
	timeout time.Duration
}

func (w *waiting) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&w.wanted, "wait", false, "return once the pool has its size")
	cmd.Flags().DurationVar(&w.timeout, "timeout", 5*time.Minute, "how long --wait waits at most")
}

// until waits until a pool matches its specification, and reports the progress.
func (w *waiting) until(ctx context.Context, a *app.App, k *app.Kube, namespace, name string) error {
	if !w.wanted {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	shown := ""
	for {
		p, err := app.Get[extensions.SandboxWarmPool](ctx, k, app.PoolsResource, namespace, name)
		if err == nil {
			err = watchPool(ctx, a, k, p, &shown)
		}
		switch {
		case errors.Is(err, errWatchEnded):
			continue
		case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
			return fmt.Errorf("pool %s does not have its size after %s: %s: %w", name, w.timeout, shown, errs.ErrUnavailable)
		}
		return err
	}
}

var errWatchEnded = errors.New("the watch has ended")

// watchPool follows a pool from a given state until it is full.
func watchPool(ctx context.Context, a *app.App, k *app.Kube, p extensions.SandboxWarmPool, shown *string) error {
	full := func() bool {
		if IsFull(&p) {
			return true
		}
		if reason, message := waitsFor(&p); reason+message != *shown {
			*shown = reason + message
			fmt.Fprintf(a.Stderr, "%d of %d ready; %s\n", readyMembers(&p), desiredMembers(&p), terminal.Plain(message))
		}
		return false
	}
	if full() {
		return nil
	}
	w, err := k.Client.Resource(app.PoolsResource).Namespace(p.Namespace).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", p.Name).String(), ResourceVersion: p.ResourceVersion,
	})
	if err != nil {
		return kubeobjects.Error(err)
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		u, ok := event.Object.(*unstructured.Unstructured)
		switch {
		case event.Type == watch.Deleted:
			return fmt.Errorf("pool %s was removed: %w", p.Name, errs.ErrNotFound)
		case event.Type == watch.Error || !ok:
			return errWatchEnded
		}
		if p, err = app.Decode[extensions.SandboxWarmPool](u); err != nil {
			return err
		}
		if full() {
			return nil
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errWatchEnded
}

// poolSize parses a number of sandboxes.
func poolSize(cmd *cobra.Command, name, text string) (int32, error) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n > maxPool {
		return 0, app.Usage(cmd, fmt.Errorf("%s: %q is not a whole number from 0 to %d", name, text, maxPool))
	}
	return int32(n), nil
}

// poolSet is a pool whose size was set, in JSON.
type poolSet struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Replicas  int32  `json:"replicas"`
}

func poolScaleCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var w waiting
	cmd := &cobra.Command{
		Use: "scale POOL COUNT", Short: "Set how many sandboxes a pool holds ready",
		Long: fmt.Sprintf("Set how many sandboxes a pool holds ready, from 0 to %d.", maxPool),
	}
	s.Flags(cmd, false)
	w.flags(cmd)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		count, err := poolSize(cmd, "COUNT", args[1])
		if err != nil {
			return err
		}
		ctx := cmd.Context()
		k, err := a.Kube(ctx)
		if err != nil {
			return err
		}
		p, err := app.GetNamed[extensions.SandboxWarmPool](ctx, k, app.PoolKind(), s.Namespace, args[0])
		if err != nil {
			return err
		}
		if auto := autoscale(&p); auto != nil {
			return fmt.Errorf("pool %s scales itself between %d and %d by its use; change or remove spec.barchan.autoscale: %w",
				p.Name, auto.MinReplicas, auto.MaxReplicas, errs.ErrConflict)
		}
		body, err := json.Marshal(map[string]any{"spec": map[string]any{"replicas": count}})
		if err != nil {
			return fmt.Errorf("encode count: %w", err)
		}
		_, err = k.Client.Resource(app.PoolsResource).Namespace(s.Namespace).
			Patch(ctx, p.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: kubeobjects.FieldManager}, "scale")
		if err != nil {
			return kubeobjects.Error(err)
		}
		if err := a.Result(poolSet{s.Namespace, p.Name, count}, fmt.Sprintf("%s scaled to %d", p.Name, count)); err != nil {
			return err
		}
		return w.until(ctx, a, k, s.Namespace, p.Name)
	}
	return cmd
}

func poolCreateCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var w waiting
	var template, size, update string
	cmd := &cobra.Command{
		Use: "create NAME --template TEMPLATE", Short: "Make a warm pool",
		Long: "Make a warm pool of a template of the same namespace, or of a public one of " + app.PublicNamespace + ".\n" +
			"Its object has more settings: see `barchan apply`.",
		Example: "  barchan pool create py --template base --size 10 --wait",
	}
	s.Flags(cmd, false)
	w.flags(cmd)
	a.JSONFlag(cmd)
	f := cmd.Flags()
	f.StringVar(&template, "template", "", "name of the template")
	f.StringVar(&size, "size", "1", fmt.Sprintf("how many sandboxes to hold ready, from 0 to %d", maxPool))
	f.StringVar(&update, "update", string(extensions.UpdateOnReplenish), "when sandboxes of older revisions go: OnReplenish or Recreate")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		count, err := poolSize(cmd, "--size", size)
		switch {
		case err != nil:
			return err
		case template == "":
			return app.Usage(cmd, errors.New("--template is missing"))
		case update != string(extensions.UpdateOnReplenish) && update != string(extensions.UpdateRecreate):
			return app.Usage(cmd, fmt.Errorf("--update: %q is neither OnReplenish nor Recreate", update))
		}
		ctx := cmd.Context()
		k, err := a.Kube(ctx)
		if err != nil {
			return err
		}
		t, err := k.Template(ctx, s.Namespace, template)
		if err != nil {
			return err
		}
		if err := createPool(ctx, k, s.Namespace, args[0], &t, count, extensions.UpdateStrategyType(update)); err != nil {
			return err
		}
		if err := a.Result(poolSet{s.Namespace, args[0], count}, args[0]); err != nil {
			return err
		}
		return w.until(ctx, a, k, s.Namespace, args[0])
	}
	return cmd
}

func createPool(ctx context.Context, k *app.Kube, namespace, name string, t *extensions.SandboxTemplate, size int32, update extensions.UpdateStrategyType) error {
	p := &extensions.SandboxWarmPool{
		TypeMeta:   metav1.TypeMeta{APIVersion: extensions.GroupVersion.String(), Kind: "SandboxWarmPool"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: extensions.SandboxWarmPoolSpec{
			Replicas: &size, SandboxTemplateRef: extensions.SandboxTemplateRef{Name: t.Name},
			UpdateStrategy: &extensions.UpdateStrategy{Type: update},
		},
	}
	if t.Namespace != namespace {
		p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{TemplateNamespace: t.Namespace}
	}
	return app.PoolKind().Taken(k.Create(ctx, app.PoolsResource, p), namespace, name)
}
