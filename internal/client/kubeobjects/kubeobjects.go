// Package kubeobjects reads objects of a Kubernetes API from files, and applies, deletes and finds them, whatever their kinds.
package kubeobjects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// FieldManager names this program's writes.
const FieldManager = "barchan"

// Decode reads YAML or JSON with any number of documents; lists are taken apart. The error is an errs.ErrInvalid that names the document.
func Decode(in io.Reader) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	dec := yaml.NewYAMLOrJSONDecoder(in, 4096)
	for n := 1; ; n++ {
		var raw map[string]any
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w: %w", n, err, errs.ErrInvalid)
		}
		if len(raw) == 0 {
			continue
		}
		u := &unstructured.Unstructured{Object: raw}
		if u.IsList() {
			err = u.EachListItem(func(o runtime.Object) error {
				item, ok := o.(*unstructured.Unstructured)
				if !ok {
					return fmt.Errorf("has an item that is no object: %w", errs.ErrInvalid)
				}
				out = append(out, item)
				return check(item)
			})
		} else {
			out = append(out, u)
			err = check(u)
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
	}
}

func check(u *unstructured.Unstructured) error {
	switch {
	case u.GetAPIVersion() == "":
		return fmt.Errorf("apiVersion is missing: %w", errs.ErrInvalid)
	case u.GetKind() == "":
		return fmt.Errorf("kind is missing: %w", errs.ErrInvalid)
	case u.GetName() == "":
		return fmt.Errorf("metadata.name of the %s is missing: %w", u.GetKind(), errs.ErrInvalid)
	}
	return nil
}

// Error gives an error of the API its kind; the message stays.
func Error(err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return errs.Public(errs.ErrNotFound, err.Error())
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return errs.Public(errs.ErrConflict, err.Error())
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return errs.Public(errs.ErrInvalid, invalidText(err))
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return errs.Public(errs.ErrForbidden, err.Error())
	}
	return fmt.Errorf("kubernetes API: %w", err)
}

// example is what Kubernetes adds to the rule that a name breaks, once more in the words of a regular expression.
var example = regexp.MustCompile(` \(e\.g\. '.*?', regex used for validation is '.*?'\)`)

// InvalidName returns why the API refuses an object of that name; empty if it does not.
func InvalidName(name string) string {
	return example.ReplaceAllString(strings.Join(validation.IsDNS1123Subdomain(name), "; "), "")
}

// invalidText names the fields of an object that the API refuses, and why, without what the caller knows: the object.
func invalidText(err error) string {
	status, ok := errors.AsType[*apierrors.StatusError](err)
	if !ok || status.ErrStatus.Details == nil || len(status.ErrStatus.Details.Causes) == 0 {
		return err.Error()
	}
	var fields []string
	for _, c := range status.ErrStatus.Details.Causes {
		fields = append(fields, c.Field+": "+example.ReplaceAllString(c.Message, ""))
	}
	return strings.Join(fields, "; ")
}

// Client works on objects of every kind that the server has. It is for one goroutine.
type Client struct {
	Dynamic   dynamic.Interface
	Namespace string // of objects that name none
	mapper    *restmapper.DeferredDiscoveryRESTMapper
}

// New returns a client. Kinds are discovered once, and again for a kind that was not there.
func New(cfg *rest.Config, client dynamic.Interface, namespace string) (*Client, error) {
	d, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("kubernetes API: %w", err)
	}
	return &Client{Dynamic: client, Namespace: namespace, mapper: restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(d))}, nil
}

// Resource returns the client of an object's kind and namespace, which is set if it is empty.
func (c *Client) Resource(u *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	gvk := u.GroupVersionKind()
	mapping, err := c.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("the server has no %s of %s: %w", gvk.Kind, gvk.GroupVersion(), errs.ErrInvalid)
	} else if err != nil {
		return nil, Error(err)
	}
	if mapping.Scope.Name() != meta.RESTScopeNameNamespace {
		return c.Dynamic.Resource(mapping.Resource), nil
	}
	if u.GetNamespace() == "" {
		u.SetNamespace(c.Namespace)
	}
	return c.Dynamic.Resource(mapping.Resource).Namespace(u.GetNamespace()), nil
}

// Results of Apply.
const (
	Created    = "created"
	Configured = "configured"
	Unchanged  = "unchanged"
)

// Options configures Apply.
type Options struct {
	Force  bool // take over fields that others manage
	DryRun bool // have the server check it, and change nothing
}

// Apply creates or changes an object by server-side apply.
func (c *Client) Apply(ctx context.Context, u *unstructured.Unstructured, opt Options) (result string, err error) {
	resource, err := c.Resource(u)
	if err != nil {
		return "", err
	}
	version := ""
	before, err := resource.Get(ctx, u.GetName(), metav1.GetOptions{})
	if err == nil {
		version = before.GetResourceVersion()
	} else if !apierrors.IsNotFound(err) {
		return "", Error(err)
	}
	return c.ApplyOver(ctx, u, version, opt)
}

// ApplyOver is Apply for a caller that has read the object: version is the resourceVersion that it had, empty if it was not there.
// The result compares with that; the server applies the object to whatever is there now.
func (c *Client) ApplyOver(ctx context.Context, u *unstructured.Unstructured, version string, opt Options) (result string, err error) {
	resource, err := c.Resource(u)
	if err != nil {
		return "", err
	}
	body, err := u.MarshalJSON()
	if err != nil {
		return "", fmt.Errorf("encode: %w", err)
	}
	patch := metav1.PatchOptions{FieldManager: FieldManager, FieldValidation: metav1.FieldValidationStrict, Force: &opt.Force}
	if opt.DryRun {
		patch.DryRun = []string{metav1.DryRunAll}
	}
	after, err := resource.Patch(ctx, u.GetName(), types.ApplyPatchType, body, patch)
	switch {
	case err != nil:
		return "", Error(err)
	case version == "":
		return Created, nil
	case version == after.GetResourceVersion():
		return Unchanged, nil
	}
	return Configured, nil
}

// Delete deletes an object, and what it owns before it. One that is not there, or whose kind is not, is deleted.
func (c *Client) Delete(ctx context.Context, u *unstructured.Unstructured) error {
	resource, err := c.Resource(u)
	if errors.Is(err, errs.ErrInvalid) {
		return nil
	} else if err != nil {
		return err
	}
	foreground := metav1.DeletePropagationForeground
	err = resource.Delete(ctx, u.GetName(), metav1.DeleteOptions{PropagationPolicy: &foreground})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return Error(err)
}

// Forget discovers all kinds again.
func (c *Client) Forget() { c.mapper.Reset() }

// ID identifies an object by its kind, as kubectl's arguments do.
func ID(u *unstructured.Unstructured) string {
	id := u.GroupVersionKind().GroupKind().String() + "/" + u.GetName()
	if ns := u.GetNamespace(); ns != "" {
		id = ns + "/" + id
	}
	return id
}
