package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// recordName is the ConfigMap with the record of an installation.
const recordName = "barchan-install"

// record is what is known of an installation.
type record struct {
	Version string
	Values  Values
	Objects []reference // in the order of their creation; more than there are, if an installation was interrupted
	// By is who has made the installation, where it was not Install: "Helm", or whoever applied the manifests. Then Version has the
	// form of a chart's, Objects are the Deployments of the roles alone, and there are no Values.
	By string
}

// reference names an object.
type reference struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name"`
}

func referenceTo(u *unstructured.Unstructured) reference {
	return reference{u.GetAPIVersion(), u.GetKind(), u.GetNamespace(), u.GetName()}
}

func (r reference) object() *unstructured.Unstructured {
	u := &unstructured.Unstructured{}
	u.SetAPIVersion(r.APIVersion)
	u.SetKind(r.Kind)
	u.SetNamespace(r.Namespace)
	u.SetName(r.Name)
	return u
}

// recordObject is the ConfigMap, without content.
func (c *Cluster) recordObject() *unstructured.Unstructured {
	return reference{"v1", "ConfigMap", c.cfg.Namespace, recordName}.object()
}

// readRecord returns the record; an errs.ErrNotFound without an installation.
func (c *Cluster) readRecord(ctx context.Context) (record, error) {
	var r record
	u, err := c.get(ctx, c.recordObject())
	if err != nil {
		if errors.Is(err, errs.ErrNotFound) {
			err = errs.Public(err, fmt.Sprintf("Barchan is not installed in namespace %s; `barchan cluster install` does, --system-namespace names another", c.cfg.Namespace))
		}
		return r, err
	}
	data, _, err := unstructured.NestedStringMap(u.Object, "data")
	if err == nil {
		r.Version = data["version"]
		err = errors.Join(yaml.Unmarshal([]byte(data["values"]), &r.Values), json.Unmarshal([]byte(data["objects"]), &r.Objects))
	}
	if err != nil {
		return r, fmt.Errorf("ConfigMap %s/%s: %w: %w", c.cfg.Namespace, recordName, err, errs.ErrInvalid)
	}
	return r, nil
}

// installed returns the record, or what the roles' Deployments tell of an installation that Install has not made; an errs.ErrNotFound
// without an installation.
func (c *Cluster) installed(ctx context.Context) (record, error) {
	r, err := c.readRecord(ctx)
	if !errors.Is(err, errs.ErrNotFound) {
		return r, err
	}
	list, listErr := c.kube.AppsV1().Deployments(c.cfg.Namespace).List(ctx, metav1.ListOptions{LabelSelector: partOf + "=" + partOfUs})
	if listErr != nil {
		return r, kubeobjects.Error(listErr)
	}
	for i := range list.Items {
		d := &list.Items[i]
		r.Version, r.By = d.Labels["app.kubernetes.io/version"], d.Labels[managedBy]
		if r.By == managedByUs {
			r.By = "manifests"
		}
		r.Objects = append(r.Objects, reference{"apps/v1", kindDeployment, d.Namespace, d.Name})
	}
	if len(r.Objects) > 0 {
		err = nil
	}
	return r, err
}

// writeRecord writes the record of an installation that begins or has ended.
func (c *Cluster) writeRecord(ctx context.Context, r record) error {
	values, err := yaml.Marshal(r.Values)
	if err != nil {
		return err
	}
	objects, err := json.Marshal(r.Objects)
	if err != nil {
		return err
	}
	u := c.recordObject()
	u.SetLabels(map[string]string{managedBy: managedByUs})
	u.Object["data"] = map[string]any{"version": r.Version, "values": string(values), "objects": string(objects)}
	_, err = c.objects.Apply(ctx, u, kubeobjects.Options{Force: true})
	return err
}

// union returns the references of both, those of now in their order.
func union(before, now []reference) []reference {
	all := slices.Clone(now)
	for _, r := range before {
		if !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}
