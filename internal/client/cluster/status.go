package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorization "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

const leaseName = "barchan-controller"

// Status is the state of an installation.
type Status struct {
	Version    string         `json:"version"`
	By         string         `json:"by,omitempty"` // Helm or manifests, where `barchan cluster install` has not installed it
	Kubernetes string         `json:"kubernetes"`
	Namespace  string         `json:"namespace"`
	Roles      []Role         `json:"roles"`
	Leader     string         `json:"leader,omitempty"`  // the Pod whose controllers work
	Objects    map[string]int `json:"objects,omitempty"` // by resource, of all namespaces
}

// Status reads the state of the installation; an errs.ErrNotFound without one.
func (c *Cluster) Status(ctx context.Context) (Status, error) {
	s := Status{Namespace: c.cfg.Namespace}
	r, err := c.installed(ctx)
	if err != nil {
		return s, err
	}
	s.Version, s.By = r.Version, r.By
	info, err := c.kube.Discovery().ServerVersion()
	if err != nil {
		return s, kubeobjects.Error(err)
	}
	s.Kubernetes = info.GitVersion
	for _, o := range r.Objects {
		if o.Kind != kindDeployment {
			continue
		}
		made, err := c.role(ctx, o.Name)
		if err != nil {
			made.Problem = errs.Text(err)
		}
		s.Roles = append(s.Roles, made)
	}
	s.Leader, err = c.leader(ctx)
	if err != nil {
		return s, err
	}
	s.Objects, err = c.Count(ctx)
	return s, err
}

// leader returns the Pod that holds the Lease of the controllers; empty if none renews it.
func (c *Cluster) leader(ctx context.Context) (string, error) {
	lease, err := c.kube.CoordinationV1().Leases(c.cfg.Namespace).Get(ctx, leaseName, metav1.GetOptions{})
	if err = kubeobjects.Error(err); errors.Is(err, errs.ErrNotFound) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	if l := lease.Spec; l.HolderIdentity != nil && l.RenewTime != nil && l.LeaseDurationSeconds != nil &&
		time.Since(l.RenewTime.Time) < 2*time.Duration(*l.LeaseDurationSeconds)*time.Second { // clocks may differ
		return *l.HolderIdentity, nil
	}
	return "", nil
}

// Doctor checks whether the cluster can run Barchan, and the installation if there is one. Errors of a check are its result.
func (c *Cluster) Doctor(ctx context.Context) []adminclient.Check {
	checks := []adminclient.Check{c.checkKubernetes(), c.checkNodes(ctx), c.checkRuntimes(ctx), c.checkUpstream(ctx), c.checkPodSecurity(ctx)}
	r, err := c.installed(ctx)
	if errors.Is(err, errs.ErrNotFound) {
		return append(checks, c.checkRights(ctx), warning("installation", errs.Text(err), ""))
	} else if err != nil {
		return append(checks, unknown("installation", err))
	}
	checks = append(checks, c.checkObjects(ctx, r))
	for _, o := range r.Objects {
		if o.Kind == kindDeployment {
			checks = append(checks, c.checkDeployment(ctx, o.Name))
		}
	}
	return append(checks, c.checkLeader(ctx), c.checkTenants(ctx), c.checkTemplates(ctx))
}

func ok(name, detail string) adminclient.Check {
	return adminclient.Check{Name: name, State: adminclient.CheckOK, Detail: detail}
}

func warning(name, detail, remedy string) adminclient.Check {
	return adminclient.Check{Name: name, State: adminclient.CheckWarning, Detail: detail, Remedy: remedy}
}

func failed(name, detail, remedy string) adminclient.Check {
	return adminclient.Check{Name: name, State: adminclient.CheckFailed, Detail: detail, Remedy: remedy}
}

// unknown is a check that an error prevented.
func unknown(name string, err error) adminclient.Check {
	remedy := ""
	if errors.Is(err, errs.ErrForbidden) {
		remedy = "use the kubeconfig of a cluster administrator"
	}
	return failed(name, errs.Text(err), remedy)
}

func (c *Cluster) checkKubernetes() adminclient.Check {
	version, err := c.checkVersion()
	if err != nil {
		return failed("kubernetes", errs.Text(err), "upgrade the cluster")
	}
	return ok("kubernetes", version)
}

func (c *Cluster) checkNodes(ctx context.Context) adminclient.Check {
	nodes, err := c.kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return unknown("nodes", kubeobjects.Error(err))
	}
	var lost []string
	for _, n := range nodes.Items {
		if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			lost = append(lost, n.Name)
		}
	}
	switch {
	case len(nodes.Items) == 0:
		return warning("nodes", "the cluster has none; Pods wait until it has", "")
	case len(lost) > 0:
		return warning("nodes", fmt.Sprintf("%d of %d are not ready: %s", len(lost), len(nodes.Items), strings.Join(lost, ", ")), "")
	}
	return ok("nodes", fmt.Sprintf("%d ready", len(nodes.Items)))
}

// isolating are the handlers of RuntimeClasses that keep sandboxes from the kernel of their node.
var isolating = []string{"runsc", "gvisor", "kata"}

func (c *Cluster) checkRuntimes(ctx context.Context) adminclient.Check {
	const name = "isolation"
	classes, err := c.kube.NodeV1().RuntimeClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		return unknown(name, kubeobjects.Error(err))
	}
	var found []string
	for _, class := range classes.Items {
		if slices.ContainsFunc(isolating, func(handler string) bool { return strings.HasPrefix(class.Handler, handler) }) {
			found = append(found, class.Name)
		}
	}
	if len(found) == 0 {
		return warning(name, "no RuntimeClass of gVisor or Kata: sandboxes share the kernel of their node", "install gVisor on the nodes, and set sandbox.runtimeClass")
	}
	return ok(name, "RuntimeClass "+strings.Join(found, ", "))
}

func (c *Cluster) checkUpstream(ctx context.Context) adminclient.Check {
	const name = "other controllers"
	d, err := c.upstream(ctx)
	switch {
	case errors.Is(err, errs.ErrNotFound):
		return ok(name, "none works on the same objects")
	case err != nil:
		return unknown(name, err)
	case d.Status.Replicas > 0:
		return failed(name, "agent-sandbox's controller runs in namespace "+upstreamNamespace, "`barchan cluster install --take-over` stops it")
	}
	return ok(name, "agent-sandbox's controller is stopped")
}

// checkPodSecurity looks for the label that holds the Pods of the roles to the strictest standard. Helm does not set it.
func (c *Cluster) checkPodSecurity(ctx context.Context) adminclient.Check {
	const name = "pod security"
	got, err := c.kube.CoreV1().Namespaces().Get(ctx, c.cfg.Namespace, metav1.GetOptions{})
	if err = kubeobjects.Error(err); errors.Is(err, errs.ErrNotFound) {
		return ok(name, "an installation makes namespace "+c.cfg.Namespace)
	} else if err != nil {
		return unknown(name, err)
	}
	if got.Labels[podSecurity] != strictest {
		return warning(name, fmt.Sprintf("namespace %s has no label %s=%s", c.cfg.Namespace, podSecurity, strictest), fmt.Sprintf("`kubectl label --overwrite namespace %s %s=%s`", c.cfg.Namespace, podSecurity, strictest))
	}
	return ok(name, fmt.Sprintf("namespace %s is %s", c.cfg.Namespace, strictest))
}

// checkRights finds out whether the caller may install.
func (c *Cluster) checkRights(ctx context.Context) adminclient.Check {
	const name = "rights"
	for _, a := range []authorization.ResourceAttributes{
		{Verb: "create", Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"},
		{Verb: "create", Group: "rbac.authorization.k8s.io", Resource: "clusterroles"},
		{Verb: "create", Group: "admissionregistration.k8s.io", Resource: "validatingadmissionpolicies"},
		{Verb: "create", Group: appsv1.GroupName, Resource: "deployments", Namespace: c.cfg.Namespace},
		{Verb: "create", Resource: "secrets", Namespace: c.cfg.Namespace},
	} {
		review, err := c.kube.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorization.SelfSubjectAccessReview{
			Spec: authorization.SelfSubjectAccessReviewSpec{ResourceAttributes: &a},
		}, metav1.CreateOptions{})
		if err != nil {
			return unknown(name, kubeobjects.Error(err))
		}
		if !review.Status.Allowed {
			return failed(name, fmt.Sprintf("this kubeconfig may not %s %s", a.Verb, schema.GroupResource{Group: a.Group, Resource: a.Resource}), "use that of a cluster administrator")
		}
	}
	return ok(name, "this kubeconfig may install")
}

// checkObjects looks for objects of the installation that were deleted.
func (c *Cluster) checkObjects(ctx context.Context, r record) adminclient.Check {
	const name = "installation"
	var missing []string
	for _, o := range r.Objects {
		if _, err := c.get(ctx, o.object()); errors.Is(err, errs.ErrNotFound) {
			missing = append(missing, kubeobjects.ID(o.object()))
		} else if err != nil {
			return unknown(name, err)
		}
	}
	if len(missing) > 0 {
		return failed(name, fmt.Sprintf("%d of %d objects are missing, such as %s", len(missing), len(r.Objects), missing[0]), "`barchan cluster install` creates them again")
	}
	if r.By != "" {
		detail := fmt.Sprintf("version %s in namespace %s, by %s", r.Version, c.cfg.Namespace, r.By)
		if own := strings.ReplaceAll(semantic(c.cfg.Version), "+", "_"); r.Version != own {
			return warning(name, fmt.Sprintf("%s; this program is %s", detail, own), fmt.Sprintf("upgrade it by %s, with the chart or manifests of this program", r.By))
		}
		return ok(name, detail)
	}
	if r.Version != c.cfg.Version {
		return warning(name, fmt.Sprintf("version %s; this program is %s", r.Version, c.cfg.Version), "`barchan cluster install` changes it to this program's")
	}
	return ok(name, fmt.Sprintf("version %s in namespace %s, %d objects", r.Version, c.cfg.Namespace, len(r.Objects)))
}

func (c *Cluster) checkDeployment(ctx context.Context, name string) adminclient.Check {
	r, err := c.role(ctx, name)
	switch {
	case err != nil:
		return unknown(name, err)
	case !r.rolledOut:
		return failed(name, r.Text(), fmt.Sprintf("see `kubectl describe deployment -n %s %s`", c.cfg.Namespace, name))
	}
	return ok(name, r.Text())
}

func (c *Cluster) checkLeader(ctx context.Context) adminclient.Check {
	const name = "leader"
	leader, err := c.leader(ctx)
	switch {
	case err != nil:
		return unknown(name, err)
	case leader == "":
		return failed(name, "no controller works", fmt.Sprintf("see `kubectl logs -n %s -l app.kubernetes.io/name=barchan-controller`", c.cfg.Namespace))
	}
	return ok(name, leader)
}

// checkTenants looks for namespaces whose keys are of no use.
func (c *Cluster) checkTenants(ctx context.Context) adminclient.Check {
	const name = "tenants"
	keys, err := c.list(ctx, barchan.GroupVersion.WithResource("apikeys"))
	if err != nil {
		return unknown(name, err)
	}
	namespaces := map[string]bool{}
	for _, k := range keys {
		namespaces[k.GetNamespace()] = true
	}
	for namespace := range namespaces {
		got, err := c.kube.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		if err != nil {
			return unknown(name, kubeobjects.Error(err))
		}
		if _, is := got.Labels[barchan.TenantLabel]; !is {
			return warning(name, fmt.Sprintf("namespace %s has API keys, but not the label %s", namespace, barchan.TenantLabel), fmt.Sprintf("`kubectl label namespace %s %s=`", namespace, barchan.TenantLabel))
		}
	}
	if len(namespaces) == 0 {
		return warning(name, "no namespace has an API key", "`barchan key create` makes one")
	}
	return ok(name, fmt.Sprintf("%d with %d API keys", len(namespaces), len(keys)))
}

func (c *Cluster) checkTemplates(ctx context.Context) adminclient.Check {
	const name = "templates"
	n, err := c.CountTemplates(ctx)
	if err != nil {
		return unknown(name, err)
	}
	if n == 0 {
		return warning(name, "there is none, so that the REST API cannot create sandboxes", "`barchan cluster install --template-image IMAGE` makes the template base")
	}
	return ok(name, fmt.Sprint(n))
}
