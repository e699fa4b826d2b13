package cluster

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// TokenSecret is the Secret that all tokens of sandboxes derive from, unless the value tokenSecret names another.
const TokenSecret = "barchan-token" //nolint:gosec // the name of a Secret

const (
	kindCRD        = "CustomResourceDefinition"
	kindDeployment = "Deployment"
	tokenKey       = "token-secret"
	tokenBytes     = 32

	// podSecurity is the label of a namespace with the Pod security standard of its Pods.
	podSecurity = "pod-security.kubernetes.io/enforce"
	strictest   = "restricted"

	// Upstream's controller, which works on the same kinds.
	upstreamNamespace  = "agent-sandbox-system"
	upstreamDeployment = "agent-sandbox-controller"

	pollInterval = 500 * time.Millisecond
)

// oldestKubernetes is the first with field selectors on custom resources.
var oldestKubernetes = version.MustParseGeneric("1.32.0")

// Config configures New. All is required.
type Config struct {
	REST      *rest.Config
	Dynamic   dynamic.Interface
	Namespace string // of the roles
	Version   string // of this program
	Progress  func(adminclient.Event)
}

// Cluster is a Kubernetes cluster, as its administrator reaches it. It is for one goroutine.
type Cluster struct {
	cfg     Config
	objects *kubeobjects.Client
	kube    kubernetes.Interface
}

// New returns a Cluster. It sends no request.
func New(cfg Config) (*Cluster, error) {
	objects, err := kubeobjects.New(cfg.REST, cfg.Dynamic, cfg.Namespace)
	if err != nil {
		return nil, err
	}
	kube, err := kubernetes.NewForConfig(cfg.REST)
	if err != nil {
		return nil, fmt.Errorf("kubernetes API: %w", err)
	}
	return &Cluster{cfg: cfg, objects: objects, kube: kube}, nil
}

func (c *Cluster) report(step string, format string, args ...any) {
	c.cfg.Progress(adminclient.Event{Step: step, Message: fmt.Sprintf(format, args...)})
}

// InstallOptions configures Install.
type InstallOptions struct {
	Values   Values // over those of the installation that is there
	Reset    bool   // forget the values of that
	TakeOver bool   // stop the controller of agent-sandbox, and own its definitions of kinds
	// Timeout bounds the wait for the roles to be ready, once all objects are there.
	Timeout time.Duration
}

// Install installs Barchan, or changes the installation that is there to this program's version and to other values, also to an
// older version. It returns when the roles are ready. An error leaves what was created, and the record of it: Install may be
// repeated, and Purge removes it.
func (c *Cluster) Install(ctx context.Context, opt InstallOptions) error {
	if _, err := c.checkVersion(); err != nil {
		return err
	}
	before, err := c.readRecord(ctx)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return err
	}
	now := record{Version: c.cfg.Version, Values: Merge(before.Values, opt.Values)}
	if opt.Reset {
		now.Values = Merge(nil, opt.Values)
	}
	objects, err := c.render(now.Values)
	if err != nil {
		return err
	}
	versions, err := c.checkOwners(ctx, objects, opt.TakeOver)
	if err != nil {
		return err
	}
	for _, u := range objects {
		now.Objects = append(now.Objects, referenceTo(u))
	}
	if err := c.change(ctx, before.Objects, now, objects, versions, opt.TakeOver); err != nil {
		return err
	}
	return c.awaitRoles(ctx, objects, opt.Timeout)
}

// render returns the objects of an installation, marked as ours. The Secret is made apart, where another never replaces it.
func (c *Cluster) render(values Values) ([]*unstructured.Unstructured, error) {
	values = Merge(values, nil)
	if s, _ := values["tokenSecret"].(string); s == "" {
		values["tokenSecret"] = TokenSecret
	}
	objects, err := Render(Release{Namespace: c.cfg.Namespace, Version: c.cfg.Version}, values)
	for _, u := range objects {
		labels := u.GetLabels()
		if labels == nil {
			labels = map[string]string{}
		}
		labels[managedBy] = managedByUs
		u.SetLabels(labels)
	}
	return objects, err
}

// change brings the cluster from the objects before to those of a record, and writes the record: before the objects, so that it has
// all that may be there, and after them.
func (c *Cluster) change(ctx context.Context, before []reference, now record, objects []*unstructured.Unstructured, versions map[string]string, takeOver bool) error {
	begun := now
	begun.Objects = union(before, now.Objects)
	steps := []func() error{
		func() error { return c.ensureNamespace(ctx) },
		func() error { return c.writeRecord(ctx, begun) },
		func() error {
			if !takeOver {
				return nil
			}
			if err := c.stopUpstream(ctx); err != nil {
				return err
			}
			return c.dropConversions(ctx, objects, versions)
		},
		func() error { return c.ensureToken(ctx) },
		func() error { return c.applyAll(ctx, objects, versions) },
		func() error { return c.prune(ctx, before, now.Objects) },
		func() error { return c.writeRecord(ctx, now) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// Merge returns a copy of values with others over them.
func Merge(values, over Values) Values {
	out := Values{}
	for k, v := range values {
		if m, ok := v.(Values); ok {
			v = Merge(m, nil)
		}
		out[k] = v
	}
	for k, v := range over {
		below, isMap := out[k].(Values)
		if m, ok := v.(Values); ok && isMap {
			v = Merge(below, m)
		}
		out[k] = v
	}
	return out
}

func (c *Cluster) checkVersion() (string, error) {
	info, err := c.kube.Discovery().ServerVersion()
	if err != nil {
		return "", kubeobjects.Error(err)
	}
	v, err := version.ParseGeneric(info.GitVersion)
	if err != nil {
		return "", fmt.Errorf("version of the cluster, %q: %w", info.GitVersion, err)
	}
	if v.LessThan(oldestKubernetes) {
		return "", fmt.Errorf("the cluster is Kubernetes %s; Barchan needs %d.%d or later: %w", info.GitVersion, oldestKubernetes.Major(), oldestKubernetes.Minor(), errs.ErrInvalid)
	}
	return info.GitVersion, nil
}

// get reads an object of any kind. One whose kind the server does not have is not found either.
func (c *Cluster) get(ctx context.Context, u *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	resource, err := c.objects.Resource(u)
	if errors.Is(err, errs.ErrInvalid) {
		return nil, errs.Public(errs.ErrNotFound, err.Error())
	} else if err != nil {
		return nil, err
	}
	got, err := resource.Get(ctx, u.GetName(), metav1.GetOptions{})
	return got, kubeobjects.Error(err)
}

// checkOwners refuses to change what Helm or another project has installed. It returns the resourceVersions of the objects that are
// there, by their IDs.
func (c *Cluster) checkOwners(ctx context.Context, objects []*unstructured.Unstructured, takeOver bool) (versions map[string]string, err error) {
	versions = map[string]string{}
	for _, u := range objects {
		have, err := c.get(ctx, u)
		if errors.Is(err, errs.ErrNotFound) {
			continue
		} else if err != nil {
			return nil, err
		}
		versions[kubeobjects.ID(u)] = have.GetResourceVersion()
		switch owner := have.GetLabels()[managedBy]; {
		case owner == managedByUs:
		case owner == "Helm":
			a := have.GetAnnotations()
			return nil, fmt.Errorf("%s belongs to the Helm release %s of namespace %s; upgrade that with Helm: %w", kubeobjects.ID(u),
				a["meta.helm.sh/release-name"], a["meta.helm.sh/release-namespace"], errs.ErrConflict)
		case !takeOver:
			return nil, fmt.Errorf("%s is there already, and not Barchan's; --take-over replaces it: %w", kubeobjects.ID(u), errs.ErrConflict)
		}
		if err := checkStored(u, have); err != nil {
			return nil, err
		}
	}
	if takeOver {
		return versions, nil
	}
	d, err := c.upstream(ctx)
	if err == nil && d.Status.Replicas > 0 {
		err = fmt.Errorf("agent-sandbox's controller runs in namespace %s and works on the same objects; --take-over stops it: %w", upstreamNamespace, errs.ErrConflict)
	}
	if errors.Is(err, errs.ErrNotFound) {
		err = nil
	}
	return versions, err
}

// checkStored refuses to replace the definition of a kind that has objects of a version that ours has not: nothing could read them.
func checkStored(u, have *unstructured.Unstructured) error {
	stored, _, err := unstructured.NestedStringSlice(have.Object, "status", "storedVersions")
	if err != nil || u.GetKind() != kindCRD {
		return err
	}
	served, err := versionsOf(u)
	if err != nil {
		return err
	}
	for _, version := range stored {
		if !slices.Contains(served, version) {
			return fmt.Errorf("the cluster may have stored objects of %s as %s, and Barchan reads %s alone; while their own controller runs, write each once more (kubectl get %s -A -o json | kubectl replace -f -), then set the versions (kubectl patch crd %s --subresource=status --type=merge -p '{\"status\":{\"storedVersions\":[\"%s\"]}}'): %w",
				u.GetName(), version, strings.Join(served, ", "), u.GetName(), u.GetName(), served[0], errs.ErrConflict)
		}
	}
	return nil
}

// dropConversions ends the conversion of kinds by a webhook, which nothing serves any more. Server-side apply would leave it, since it
// is another's field. It notes the new resourceVersions.
func (c *Cluster) dropConversions(ctx context.Context, objects []*unstructured.Unstructured, versions map[string]string) error {
	for _, u := range objects {
		if u.GetKind() != kindCRD {
			continue
		}
		have, err := c.get(ctx, u)
		if errors.Is(err, errs.ErrNotFound) {
			continue
		} else if err != nil {
			return err
		}
		if strategy, _, _ := unstructured.NestedString(have.Object, "spec", "conversion", "strategy"); strategy != "Webhook" {
			continue
		}
		resource, err := c.objects.Resource(u)
		if err != nil {
			return err
		}
		patched, err := resource.Patch(ctx, u.GetName(), types.MergePatchType, []byte(`{"spec":{"conversion":{"strategy":"None","webhook":null}}}`), metav1.PatchOptions{FieldManager: kubeobjects.FieldManager})
		if err != nil {
			return kubeobjects.Error(err)
		}
		versions[kubeobjects.ID(u)] = patched.GetResourceVersion()
	}
	return nil
}

// upstream returns agent-sandbox's controller; an errs.ErrNotFound without one. The value controller.name may give ours its name.
func (c *Cluster) upstream(ctx context.Context) (*appsv1.Deployment, error) {
	d, err := c.kube.AppsV1().Deployments(upstreamNamespace).Get(ctx, upstreamDeployment, metav1.GetOptions{})
	if err == nil && d.Labels[partOf] == partOfUs {
		return nil, fmt.Errorf("controller %s/%s is Barchan's: %w", upstreamNamespace, upstreamDeployment, errs.ErrNotFound)
	}
	return d, kubeobjects.Error(err)
}

// stopUpstream scales agent-sandbox's controller to zero, and waits until none runs.
func (c *Cluster) stopUpstream(ctx context.Context) error {
	d, err := c.upstream(ctx)
	if errors.Is(err, errs.ErrNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	c.report("take over", "stop %s/%s", upstreamNamespace, upstreamDeployment)
	_, err = c.kube.AppsV1().Deployments(upstreamNamespace).Patch(ctx, upstreamDeployment, types.MergePatchType, []byte(`{"spec":{"replicas":0}}`), metav1.PatchOptions{FieldManager: kubeobjects.FieldManager})
	if err != nil {
		return kubeobjects.Error(err)
	}
	selector := metav1.FormatLabelSelector(d.Spec.Selector)
	return wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		pods, err := c.kube.CoreV1().Pods(upstreamNamespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
		return err == nil && len(pods.Items) == 0, kubeobjects.Error(err)
	})
}

// Namespace returns the namespace of the roles. Its Pods are held to the strictest of the Pod security standards.
func Namespace(name string) *unstructured.Unstructured {
	u := reference{"v1", "Namespace", "", name}.object()
	u.SetLabels(map[string]string{managedBy: managedByUs, podSecurity: strictest})
	return u
}

func (c *Cluster) ensureNamespace(ctx context.Context) error {
	_, err := c.objects.Apply(ctx, Namespace(c.cfg.Namespace), kubeobjects.Options{Force: true})
	return err
}

// ensureToken makes the secret that all tokens derive from, unless it is there.
func (c *Cluster) ensureToken(ctx context.Context) error {
	u := reference{"v1", "Secret", c.cfg.Namespace, TokenSecret}.object()
	if _, err := c.get(ctx, u); !errors.Is(err, errs.ErrNotFound) {
		return err
	}
	secret := make([]byte, tokenBytes)
	if _, err := rand.Read(secret); err != nil {
		return err
	}
	u.SetLabels(map[string]string{managedBy: managedByUs})
	u.Object["data"] = map[string]any{tokenKey: base64.StdEncoding.EncodeToString(secret)}
	resource, err := c.objects.Resource(u)
	if err != nil {
		return err
	}
	_, err = resource.Create(ctx, u, metav1.CreateOptions{FieldManager: kubeobjects.FieldManager})
	if err = kubeobjects.Error(err); errors.Is(err, errs.ErrConflict) { // another installer was faster
		return nil
	}
	return err
}

// applyAll applies the objects in their order. Definitions are served before objects of others are applied.
func (c *Cluster) applyAll(ctx context.Context, objects []*unstructured.Unstructured, versions map[string]string) error {
	for i, u := range objects {
		did, err := c.objects.ApplyOver(ctx, u, versions[kubeobjects.ID(u)], kubeobjects.Options{Force: true})
		if err != nil {
			return fmt.Errorf("apply %s: %w", kubeobjects.ID(u), err)
		}
		c.cfg.Progress(adminclient.Event{Step: "apply objects", Done: int64(i + 1), Total: int64(len(objects)), Message: kubeobjects.ID(u) + " " + did})
		if last := i+1 == len(objects) || objects[i+1].GetKind() != kindCRD; u.GetKind() == kindCRD && last {
			if err := c.awaitDefinitions(ctx, objects[:i+1]); err != nil {
				return err
			}
		}
	}
	return nil
}

// awaitDefinitions waits until the API server serves the kinds and tells clients so, which it does later.
func (c *Cluster) awaitDefinitions(ctx context.Context, definitions []*unstructured.Unstructured) error {
	for _, u := range definitions {
		err := wait.PollUntilContextCancel(ctx, pollInterval/5, true, func(ctx context.Context) (bool, error) {
			have, err := c.get(ctx, u)
			if err != nil || !conditionTrue(have, "Established") {
				return false, err
			}
			return c.discovered(have)
		})
		if err != nil {
			return fmt.Errorf("wait for %s: %w", kubeobjects.ID(u), err)
		}
	}
	return nil
}

// discovered reports whether discovery has the kind of a definition in all its versions.
func (c *Cluster) discovered(definition *unstructured.Unstructured) (bool, error) {
	group, _, err := unstructured.NestedString(definition.Object, "spec", "group")
	kind, _, kindErr := unstructured.NestedString(definition.Object, "spec", "names", "kind")
	versions, versionsErr := versionsOf(definition)
	if err := errors.Join(err, kindErr, versionsErr); err != nil {
		return false, err
	}
	for _, v := range versions {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: v, Kind: kind})
		if _, err := c.objects.Resource(u); errors.Is(err, errs.ErrInvalid) {
			c.objects.Forget()
			return false, nil
		} else if err != nil {
			return false, err
		}
	}
	return true, nil
}

// versionsOf returns the names of a definition's versions.
func versionsOf(definition *unstructured.Unstructured) (names []string, err error) {
	list, _, err := unstructured.NestedSlice(definition.Object, "spec", "versions")
	for _, v := range list {
		if v, ok := v.(Values); ok {
			names = append(names, fmt.Sprint(v["name"]))
		}
	}
	return names, err
}

func conditionTrue(u *unstructured.Unstructured, kind string) bool {
	conditions, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	return slices.ContainsFunc(conditions, func(v any) bool {
		m, ok := v.(Values)
		return ok && m["type"] == kind && m["status"] == "True"
	})
}

// prune deletes what an earlier version or other values had and this one has not.
func (c *Cluster) prune(ctx context.Context, before, now []reference) error {
	for _, r := range before {
		if slices.Contains(now, r) || r.Kind == kindCRD { // with a definition all its objects would go
			continue
		}
		c.report("remove", "%s, which this version does not have", kubeobjects.ID(r.object()))
		if err := c.remove(ctx, r.object()); err != nil {
			return err
		}
	}
	return nil
}

// awaitRoles waits until all Pods of the roles are of the new version and ready.
func (c *Cluster) awaitRoles(ctx context.Context, objects []*unstructured.Unstructured, timeout time.Duration) error {
	limited, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("after %s: %w", timeout, errs.ErrUnavailable))
	defer cancel()
	for _, u := range objects {
		if u.GetKind() != kindDeployment {
			continue
		}
		last := ""
		err := wait.PollUntilContextCancel(limited, pollInterval, true, func(ctx context.Context) (bool, error) {
			r, err := c.role(ctx, u.GetName())
			if err != nil {
				return false, err
			}
			if text := r.Text(); text != last {
				last = text
				c.report("start "+u.GetName(), "%s", text)
			}
			return r.rolledOut, nil
		})
		if err != nil && ctx.Err() == nil && limited.Err() != nil {
			return fmt.Errorf("%s: %s: %w", u.GetName(), last, context.Cause(limited))
		} else if err != nil {
			return err
		}
	}
	return nil
}

// Role is the state of a Deployment.
type Role struct {
	Name      string `json:"name"`
	Ready     int32  `json:"ready"`
	Desired   int32  `json:"desired"`
	Image     string `json:"image"`
	Problem   string `json:"problem,omitempty"` // of a Pod, in Kubernetes' words
	rolledOut bool
}

// Text describes the state for users.
func (r Role) Text() string {
	text := fmt.Sprintf("%d of %d ready", min(r.Ready, r.Desired), r.Desired)
	if more := r.Ready - r.Desired; more > 0 {
		text += fmt.Sprintf(", %d to end", more)
	}
	if r.Problem != "" {
		text += "; " + r.Problem
	}
	return text
}

func (c *Cluster) role(ctx context.Context, name string) (Role, error) {
	d, err := c.kube.AppsV1().Deployments(c.cfg.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return Role{Name: name}, kubeobjects.Error(err)
	}
	desired := int32(1)
	if d.Spec.Replicas != nil {
		desired = *d.Spec.Replicas
	}
	s := d.Status
	r := Role{Name: name, Ready: s.ReadyReplicas, Desired: desired}
	if containers := d.Spec.Template.Spec.Containers; len(containers) > 0 {
		r.Image = containers[0].Image
	}
	r.rolledOut = s.ObservedGeneration >= d.Generation && s.UpdatedReplicas == desired && s.Replicas == desired && s.ReadyReplicas == desired
	if r.rolledOut {
		return r, nil
	}
	pods, err := c.kube.CoreV1().Pods(c.cfg.Namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(d.Spec.Selector)})
	if err != nil {
		return r, kubeobjects.Error(err)
	}
	for i := range pods.Items {
		if r.Problem = problemOf(&pods.Items[i]); r.Problem != "" {
			break
		}
	}
	for _, condition := range d.Status.Conditions { // a quota or a policy that refuses Pods
		if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue && r.Problem == "" {
			r.Problem = condition.Message
		}
	}
	return r, nil
}

// problemOf returns why a Pod does not start; empty if it may be starting.
func problemOf(p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return fmt.Sprintf("Pod %s: %s: %s", p.Name, c.Reason, c.Message)
		}
	}
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
			text := strings.TrimSuffix(fmt.Sprintf("Pod %s: %s: %s", p.Name, w.Reason, w.Message), ": ")
			if t := s.LastTerminationState.Terminated; t != nil {
				text += fmt.Sprintf(" (it ended with code %d; `kubectl logs -n %s %s -p` has its log)", t.ExitCode, p.Namespace, p.Name)
			}
			return text
		}
	}
	return ""
}
