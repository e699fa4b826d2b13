package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// purged lists the kinds of which no object stays, in the order in which they are deleted: what makes others comes first.
var purged = []schema.GroupVersionResource{
	extensions.GroupVersion.WithResource("sandboxclaims"), extensions.GroupVersion.WithResource("sandboxwarmpools"),
	agents.GroupVersion.WithResource("sandboxes"), extensions.GroupVersion.WithResource("sandboxtemplates"),
	barchan.GroupVersion.WithResource("checkpoints"), barchan.GroupVersion.WithResource("templaterevisions"), barchan.GroupVersion.WithResource("templatebuilds"), barchan.GroupVersion.WithResource("volumes"), barchan.GroupVersion.WithResource("apikeys"),
}

// PurgeOptions configures Purge.
type PurgeOptions struct {
	KeepObjects bool // remove the roles alone: definitions and objects stay, and sandboxes go on
	// Timeout bounds the wait for sandboxes to end, after which their finalizers are removed.
	Timeout time.Duration
}

// Count returns how many objects of which resources Purge would delete.
func (c *Cluster) Count(ctx context.Context) (map[string]int, error) {
	counts := map[string]int{}
	for _, r := range purged {
		n, err := c.count(ctx, r)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			counts[r.Resource] = n
		}
	}
	return counts, nil
}

// count returns how many objects of a resource there are, and reads one at most; none if the server does not have it.
func (c *Cluster) count(ctx context.Context, r schema.GroupVersionResource) (int, error) {
	list, err := c.cfg.Dynamic.Resource(r).List(ctx, metav1.ListOptions{Limit: 1})
	if err = kubeobjects.Error(err); errors.Is(err, errs.ErrNotFound) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	n := len(list.Items)
	if more := list.GetRemainingItemCount(); more != nil {
		n += int(*more)
	}
	return n, nil
}

// list returns all objects of a resource; none if the server does not have it.
func (c *Cluster) list(ctx context.Context, r schema.GroupVersionResource) ([]unstructured.Unstructured, error) {
	list, err := c.cfg.Dynamic.Resource(r).List(ctx, metav1.ListOptions{})
	if err = kubeobjects.Error(err); errors.Is(err, errs.ErrNotFound) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// Purge ends all sandboxes and removes Barchan from the cluster. It may be repeated after an error.
func (c *Cluster) Purge(ctx context.Context, opt PurgeOptions) error {
	r, err := c.installed(ctx)
	if err != nil {
		return err
	}
	if r.By != "" {
		return fmt.Errorf("the installation in namespace %s is by %s, which must remove it, after the sandboxes (`kubectl delete sandboxclaims,sandboxwarmpools,sandboxes --all -A`): %w", c.cfg.Namespace, r.By, errs.ErrConflict)
	}
	if !opt.KeepObjects {
		for _, resource := range purged {
			if err := c.deleteAll(ctx, resource, opt.Timeout); err != nil {
				return err
			}
		}
		if err := errors.Join(c.removeTenants(ctx), c.removeShared(ctx)); err != nil {
			return err
		}
	}
	left := slices.DeleteFunc(slices.Clone(r.Objects), func(o reference) bool { return opt.KeepObjects && o.Kind == kindCRD })
	for _, o := range slices.Backward(left) {
		c.report("remove", "%s", kubeobjects.ID(o.object()))
		if err := c.remove(ctx, o.object()); err != nil {
			return err
		}
	}
	for _, o := range slices.Backward(left) {
		if err := c.awaitGone(ctx, o.object()); err != nil {
			return err
		}
	}
	last := []*unstructured.Unstructured{c.recordObject()}
	if !opt.KeepObjects { // another secret could not open the sandboxes that go on
		last = append(last, reference{"v1", "Secret", c.cfg.Namespace, TokenSecret}.object(), reference{"v1", "Namespace", "", c.cfg.Namespace}.object())
	}
	for _, u := range last {
		if err := c.remove(ctx, u); err != nil {
			return err
		}
	}
	return c.awaitGone(ctx, last[len(last)-1])
}

// remove deletes an object, if it is there.
func (c *Cluster) remove(ctx context.Context, u *unstructured.Unstructured) error {
	if err := c.objects.Delete(ctx, u); err != nil {
		return fmt.Errorf("remove %s: %w", kubeobjects.ID(u), err)
	}
	return nil
}

// deleteAll deletes all objects of a resource, and waits until they are gone. If the controllers do not end them in time, their
// finalizers are removed: Kubernetes then deletes what the objects own.
func (c *Cluster) deleteAll(ctx context.Context, r schema.GroupVersionResource, timeout time.Duration) error {
	client := c.cfg.Dynamic.Resource(r)
	foreground := metav1.DeletePropagationForeground
	deadline := time.Now().Add(timeout)
	shown := 0
	return wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		list, err := c.list(ctx, r)
		if err != nil || len(list) == 0 {
			return err == nil, err
		}
		if len(list) != shown {
			shown = len(list)
			c.report("delete "+r.Resource, "%d left", shown)
		}
		for i := range list {
			u := &list[i]
			if u.GetDeletionTimestamp() == nil {
				err = client.Namespace(u.GetNamespace()).Delete(ctx, u.GetName(), metav1.DeleteOptions{PropagationPolicy: &foreground})
			} else if time.Now().After(deadline) && hasOurFinalizer(u) {
				c.report("delete "+r.Resource, "%s/%s does not end; its finalizers are removed", u.GetNamespace(), u.GetName())
				_, err = client.Namespace(u.GetNamespace()).Patch(ctx, u.GetName(), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{FieldManager: kubeobjects.FieldManager})
			}
			if err = kubeobjects.Error(err); err != nil && !errors.Is(err, errs.ErrNotFound) {
				return false, err
			}
		}
		return false, nil
	})
}

// removeTenants takes our label off all namespaces.
func (c *Cluster) removeTenants(ctx context.Context) error {
	list, err := c.kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{LabelSelector: barchan.TenantLabel})
	if err != nil {
		return kubeobjects.Error(err)
	}
	for _, n := range list.Items {
		_, err := c.kube.CoreV1().Namespaces().Patch(ctx, n.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"`+barchan.TenantLabel+`":null}}}`), metav1.PatchOptions{FieldManager: kubeobjects.FieldManager})
		if err = kubeobjects.Error(err); err != nil && !errors.Is(err, errs.ErrNotFound) {
			return err
		}
	}
	return nil
}

// removeShared deletes what the sandboxes of a namespace shared, and what no object owns.
func (c *Cluster) removeShared(ctx context.Context) error {
	for _, r := range []schema.GroupVersionResource{networking.SchemeGroupVersion.WithResource("networkpolicies"), policy.SchemeGroupVersion.WithResource("poddisruptionbudgets")} {
		list, err := c.cfg.Dynamic.Resource(r).List(ctx, metav1.ListOptions{LabelSelector: sandbox.LabelPolicy})
		if err != nil {
			return kubeobjects.Error(err)
		}
		for i := range list.Items {
			if err := c.remove(ctx, &list.Items[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func hasOurFinalizer(u *unstructured.Unstructured) bool {
	return slices.ContainsFunc(u.GetFinalizers(), func(f string) bool { return strings.HasPrefix(f, barchan.GroupVersion.Group+"/") })
}

func (c *Cluster) awaitGone(ctx context.Context, u *unstructured.Unstructured) error {
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		_, err := c.get(ctx, u)
		if errors.Is(err, errs.ErrNotFound) {
			return true, nil
		}
		return false, err
	})
	if err != nil {
		return fmt.Errorf("wait until %s is gone: %w", kubeobjects.ID(u), err)
	}
	return nil
}
