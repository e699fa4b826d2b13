package cli

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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// maxPool is the maximum size of a pool.
	maxPool = 1000
	// shownEvents is how many of a pool's latest events are shown.
	shownEvents = 10
)

func (a *app) poolCommand() *cobra.Command {
	return nounCommand("pool", "Warm pools of ready sandboxes",
		a.poolCreateCommand(), a.poolLsCommand(), a.poolRmCommand(), a.poolScaleCommand(), a.poolShowCommand())
}

func (a *app) poolLsCommand() *cobra.Command {
	return lsCommand(a, lister[extensions.SandboxWarmPool]{
		short: "List warm pools",
		long: "List warm pools. READY counts sandboxes of the template's current revision, which alone are handed out;\n" +
			"STATUS says what a pool that is not full waits for.",
		find: allOf[extensions.SandboxWarmPool](poolsResource()),
		columns: columns[extensions.SandboxWarmPool]{
			header: []string{"NAMESPACE", "ID", "NAME", "TEMPLATE", "READY", "DESIRED", "REVISION", "UPDATE", "STATUS", "AGE"},
			row: func(p *extensions.SandboxWarmPool) []string {
				reason, _ := waitsFor(p)
				return []string{
					p.Namespace, poolKind().id(p), p.Name, templateName(p), fmt.Sprint(readyMembers(p)), fmt.Sprint(desiredMembers(p)),
					dash(short(p.Status.CurrentRevision)), strategy(p), reason, since(p.CreationTimestamp.Time),
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

// isFull reports whether a pool matches its specification and nothing is in progress.
func isFull(p *extensions.SandboxWarmPool) bool {
	return p.Status.ObservedGeneration >= p.Generation && meta.IsStatusConditionTrue(p.Status.Conditions, extensions.PoolReady) &&
		!meta.IsStatusConditionTrue(p.Status.Conditions, extensions.PoolProgressing)
}

func (a *app) poolShowCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{
		Use: "show POOL", Short: "Show one warm pool, its members and its last events",
		Long: "Show one warm pool, its members and its last events. --json prints the pool's object.",
		Args: exactly("POOL"),
	}
	s.flags(cmd, false)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		p, err := getNamed[extensions.SandboxWarmPool](cmd.Context(), k, poolKind(), s.namespace, args[0])
		if err != nil {
			return err
		}
		if a.json {
			return a.showObject(cmd.Context(), poolsResource(), p.Namespace, p.Name)
		}
		a.showPool(&p)
		if err := a.showMembers(cmd.Context(), k, &p); err != nil {
			return err
		}
		return a.showEvents(cmd.Context(), k, &p)
	}
	return cmd
}

func (a *app) showPool(p *extensions.SandboxWarmPool) {
	line := func(name, text string, args ...any) {
		a.field(10, name, fmt.Sprintf(text, args...))
	}
	line("Pool", "%s/%s", p.Namespace, p.Name)
	line("Template", "%s", templateName(p))
	line("Revision", "%s", dash(p.Status.CurrentRevision))
	line("Update", "%s%s", strategy(p), bounds(p))
	line("Desired", "%d", desiredMembers(p))
	line("Ready", "%d of the current revision; %d ready of %d in all", readyMembers(p), p.Status.ReadyReplicas, p.Status.Replicas)
	if b := p.Status.Barchan; b != nil {
		text := fmt.Sprint(b.ClaimedReplicas)
		if b.LastClaimTime != nil {
			text += ", the last " + since(b.LastClaimTime.Time) + " ago"
		}
		line("Claimed", "%s", text)
	}
	if auto := autoscale(p); auto != nil {
		line("Autoscale", "%d to %d, %d%% spare, down to %d after %s without a claim", auto.MinReplicas, auto.MaxReplicas, auto.SparePercent,
			auto.MinReplicas, age(time.Duration(auto.IdleSeconds)*time.Second))
	}
	reason, message := waitsFor(p)
	line("Status", "%s", strings.TrimSuffix(reason+": "+message, ": "))
	if len(p.Status.Conditions) == 0 {
		return
	}
	fmt.Fprintln(a.stdout)
	tab := newTable("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE")
	tab.colour = a.stateColours(1)
	for _, c := range p.Status.Conditions {
		tab.add(c.Type, string(c.Status), c.Reason, since(c.LastTransitionTime.Time), c.Message)
	}
	tab.write(a.stdout)
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

func (a *app) showMembers(ctx context.Context, k *kube, p *extensions.SandboxWarmPool) error {
	list, err := k.client.Resource(sandboxesResource()).Namespace(p.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: labels.Set{agents.LabelWarmPoolSandbox: string(p.UID)}.String(),
	})
	if err != nil || len(list.Items) == 0 {
		return kubeError(err)
	}
	fmt.Fprintln(a.stdout)
	tab := newTable("MEMBER", "PHASE", "REVISION", "NODE", "AGE")
	tab.colour = a.stateColours(1)
	for i := range list.Items {
		s, err := as[agents.Sandbox](&list.Items[i])
		if err != nil {
			return err
		}
		revision := short(pool.RevisionOf(&s))
		if pool.RevisionOf(&s) != p.Status.CurrentRevision {
			revision += " (stale)"
		}
		tab.add(s.Name, string(sandbox.PhaseOf(&s)), revision, dash(s.Status.NodeName), since(s.CreationTimestamp.Time))
	}
	tab.write(a.stdout)
	return nil
}

func (a *app) showEvents(ctx context.Context, k *kube, p *extensions.SandboxWarmPool) error {
	list, err := listAs[corev1.Event](ctx, k, eventsResource(), p.Namespace)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(e corev1.Event) bool { return e.InvolvedObject.UID != p.UID })
	if len(list) == 0 {
		return nil
	}
	slices.SortStableFunc(list, func(x, y corev1.Event) int { return lastSeen(&x).Compare(lastSeen(&y)) })
	fmt.Fprintln(a.stdout)
	tab := newTable("EVENT", "TYPE", "AGE", "MESSAGE")
	for i := range list[max(0, len(list)-shownEvents):] {
		e := &list[max(0, len(list)-shownEvents)+i]
		tab.add(e.Reason, e.Type, since(lastSeen(e)), e.Message)
	}
	tab.write(a.stdout)
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
	cmd.Flags().BoolVar(&w.wanted, "wait", false, "return once the pool is as wanted")
	cmd.Flags().DurationVar(&w.timeout, "timeout", 5*time.Minute, "bound of --wait")
}

// until waits until a pool matches its specification, and reports the progress.
func (w *waiting) until(ctx context.Context, a *app, k *kube, namespace, name string) error {
	if !w.wanted {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	told := ""
	for {
		p, err := getAs[extensions.SandboxWarmPool](ctx, k, poolsResource(), namespace, name)
		if err == nil {
			err = a.watchPool(ctx, k, p, &told)
		}
		switch {
		case errors.Is(err, errWatchEnded):
			continue
		case err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
			return fmt.Errorf("pool %s is not as wanted after %s: %s: %w", name, w.timeout, told, errs.ErrUnavailable)
		}
		return err
	}
}

var errWatchEnded = errors.New("the watch has ended")

// watchPool follows a pool from a given state until it is full.
func (a *app) watchPool(ctx context.Context, k *kube, p extensions.SandboxWarmPool, told *string) error {
	full := func() bool {
		if isFull(&p) {
			return true
		}
		if reason, message := waitsFor(&p); reason+message != *told {
			*told = reason + message
			fmt.Fprintf(a.stderr, "%d of %d ready; %s\n", readyMembers(&p), desiredMembers(&p), plain(message))
		}
		return false
	}
	if full() {
		return nil
	}
	w, err := k.client.Resource(poolsResource()).Namespace(p.Namespace).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", p.Name).String(), ResourceVersion: p.ResourceVersion,
	})
	if err != nil {
		return kubeError(err)
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
		if p, err = as[extensions.SandboxWarmPool](u); err != nil {
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
		return 0, &usageError{cmd, fmt.Errorf("%s: %q is not a whole number from 0 to %d", name, text, maxPool)}
	}
	return int32(n), nil
}

func (a *app) poolScaleCommand() *cobra.Command {
	var s scope
	var w waiting
	cmd := &cobra.Command{
		Use: "scale POOL COUNT", Short: "Set how many sandboxes a pool holds ready",
		Long: fmt.Sprintf("Set how many sandboxes a pool holds ready, from 0 to %d.", maxPool),
		Args: exactly("POOL", "COUNT"),
	}
	s.flags(cmd, false)
	w.flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		count, err := poolSize(cmd, "COUNT", args[1])
		if err != nil {
			return err
		}
		ctx := cmd.Context()
		k, err := a.kube(ctx)
		if err != nil {
			return err
		}
		p, err := getNamed[extensions.SandboxWarmPool](ctx, k, poolKind(), s.namespace, args[0])
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
		_, err = k.client.Resource(poolsResource()).Namespace(s.namespace).
			Patch(ctx, p.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: fieldManager}, "scale")
		if err != nil {
			return kubeError(err)
		}
		fmt.Fprintf(a.stdout, "%s scaled to %d\n", p.Name, count)
		return w.until(ctx, a, k, s.namespace, p.Name)
	}
	return cmd
}

func (a *app) poolCreateCommand() *cobra.Command {
	var s scope
	var w waiting
	var template, size, update string
	cmd := &cobra.Command{
		Use: "create NAME --template TEMPLATE", Short: "Make a warm pool",
		Long: "Make a warm pool of a template of the same namespace, or of a public one of " + publicNamespace + ".\n" +
			"What else a pool can be told stands in its object: see `barchan apply`.",
		Example: "  barchan pool create py --template base --size 10 --wait",
		Args:    exactly("NAME"),
	}
	s.flags(cmd, false)
	w.flags(cmd)
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
			return &usageError{cmd, errors.New("--template is missing")}
		case update != string(extensions.UpdateOnReplenish) && update != string(extensions.UpdateRecreate):
			return &usageError{cmd, fmt.Errorf("--update: %q is neither OnReplenish nor Recreate", update)}
		}
		ctx := cmd.Context()
		k, err := a.kube(ctx)
		if err != nil {
			return err
		}
		t, err := k.template(ctx, s.namespace, template)
		if err != nil {
			return err
		}
		if err := k.createPool(ctx, s.namespace, args[0], &t, count, extensions.UpdateStrategyType(update)); err != nil {
			return err
		}
		fmt.Fprintln(a.stdout, args[0])
		return w.until(ctx, a, k, s.namespace, args[0])
	}
	return cmd
}

func (k *kube) createPool(ctx context.Context, namespace, name string, t *extensions.SandboxTemplate, size int32, update extensions.UpdateStrategyType) error {
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
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
	if err != nil {
		return fmt.Errorf("encode pool: %w", err)
	}
	delete(content, "status")
	_, err = k.client.Resource(poolsResource()).Namespace(namespace).
		Create(ctx, &unstructured.Unstructured{Object: content}, metav1.CreateOptions{FieldManager: fieldManager})
	return kubeError(err)
}

func (a *app) poolRmCommand() *cobra.Command {
	return a.rmCommand("Remove warm pools with their unclaimed sandboxes", poolKind())
}
