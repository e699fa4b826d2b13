// Package templates finds the templates that a tenant may use: its own and the public ones. It changes none and
// keeps nothing.
package templates

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// PublicNamespace holds the templates that every tenant may use if they are marked public.
const PublicNamespace = "barchan-system"

// Cache reads templates, from memory or by CurrentTemplate from the API server; a template that it lacks is an
// errs.ErrNotFound.
type Cache interface {
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	Template(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error)
	Templates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error)
}

// Catalog has the templates of all tenants.
type Catalog struct {
	Cache Cache
	// DefaultSize applies to templates without limits. Default 2 CPUs, 1024 and 10240 MiB.
	DefaultSize Size
}

// Size is the CPUs, the memory and the disk of a sandbox.
type Size struct {
	CPUs             int
	MemoryMB, DiskMB int64
}

// Template is one blueprint as a tenant sees it.
type Template struct {
	// ID is derived from the object's UID, or from the name if a build made it. Object is the object's name, which may differ
	// from Name.
	ID, Namespace, Name, Object string
	UID                         types.UID
	// Build is the name of the build that last made it; empty for none.
	Build string
	// Aliases has the name first.
	Aliases              []string
	Public               bool
	Size                 Size
	CreatedAt, UpdatedAt time.Time
}

// Get returns a template by its name, alias or ID.
func (c *Catalog) Get(ctx context.Context, namespace, name string) (Template, error) {
	t, err := c.Resolve(ctx, namespace, name)
	if err != nil {
		return Template{}, err
	}
	return c.view(t), nil
}

// List returns a page of a tenant's templates, newest first.
func (c *Catalog) List(ctx context.Context, namespace string, limit int, cursor string) (page []Template, next string, err error) {
	limit, after, err := paging.Parse(limit, cursor, paging.Direction(false))
	if err != nil {
		return nil, "", err
	}
	all, err := c.All(ctx, namespace)
	if err != nil {
		return nil, "", err
	}
	page, next = paging.Cut(all, limit, after, paging.Direction(false), position)
	return page, next, nil
}

// All returns a tenant's templates, newest first.
func (c *Catalog) All(ctx context.Context, namespace string) ([]Template, error) {
	var all []Template
	for _, from := range sources(namespace) {
		list, err := c.Cache.Templates(ctx, from)
		if err != nil {
			return nil, fmt.Errorf("list templates: %w", err)
		}
		for i := range list {
			if Usable(&list[i], namespace) {
				all = append(all, c.view(&list[i]))
			}
		}
	}
	all, _ = paging.Cut(all, len(all), nil, paging.Direction(false), position)
	return all, nil
}

func position(t *Template) paging.Cursor { return paging.Cursor{Key: t.CreatedAt.UnixNano(), ID: t.ID} }

// sources returns the namespaces of a tenant's templates, in the order of the lookup.
func sources(namespace string) []string {
	if namespace == PublicNamespace {
		return []string{namespace}
	}
	return []string{namespace, PublicNamespace}
}

// Usable reports whether a tenant may use a template.
func Usable(t *extensions.SandboxTemplate, namespace string) bool {
	return t.DeletionTimestamp == nil && (t.Namespace == namespace || (t.Spec.Barchan != nil && t.Spec.Barchan.Public))
}

// NotFound is the error for a template that a tenant cannot use.
func NotFound(name string) error {
	return apistatus.Refuse(errs.ErrNotFound, "template '%s' not found", name)
}

// Resolve finds a template by name, alias or ID: the tenant's own first, then the public ones.
// A namespace ("team/name") and the tag "default" may qualify the name.
func (c *Catalog) Resolve(ctx context.Context, namespace, requested string) (*extensions.SandboxTemplate, error) {
	name, from := parse(namespace, requested)
	for _, source := range from {
		t, err := c.find(ctx, source, name, namespace)
		if err != nil {
			return nil, fmt.Errorf("look up template: %w", err)
		}
		if t != nil {
			return t, nil
		}
	}
	return nil, NotFound(requested)
}

// ResolveUncached finds a template by name that was applied after the last event of the cache. Reads of the API
// server for one name are shared, so requests for unknown names do not add up.
func (c *Catalog) ResolveUncached(ctx context.Context, namespace, requested string) (*extensions.SandboxTemplate, error) {
	name, from := parse(namespace, requested)
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return nil, NotFound(requested)
	}
	for _, source := range from {
		t, _, err := c.Cache.CurrentTemplate(ctx, types.NamespacedName{Namespace: source, Name: name})
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return nil, err
		}
		if err == nil && Usable(t, namespace) {
			return t, nil
		}
	}
	return nil, NotFound(requested)
}

// parse returns the name within a reference to a template, and the namespaces to search; none if it is not valid.
func parse(namespace, requested string) (name string, from []string) {
	name, from = strings.TrimSuffix(requested, ":default"), sources(namespace)
	if team, rest, qualified := strings.Cut(name, "/"); qualified {
		if !slices.Contains(from, team) {
			return "", nil
		}
		name, from = rest, []string{team}
	}
	if name == "" {
		return "", nil
	}
	return name, from
}

// find returns nil if the namespace has no such template for the tenant.
func (c *Catalog) find(ctx context.Context, from, name, tenant string) (*extensions.SandboxTemplate, error) {
	if len(validation.IsDNS1123Subdomain(name)) == 0 {
		t, err := c.Cache.Template(ctx, types.NamespacedName{Namespace: from, Name: name})
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return nil, err
		}
		if err == nil && Usable(t, tenant) {
			return t, nil
		}
	}
	list, err := c.Cache.Templates(ctx, from)
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(t extensions.SandboxTemplate) bool { return !Usable(&t, tenant) })
	i := slices.IndexFunc(list, func(t extensions.SandboxTemplate) bool {
		return t.Spec.Barchan != nil && slices.Contains(t.Spec.Barchan.Aliases, name)
	})
	if i < 0 {
		i = slices.IndexFunc(list, func(t extensions.SandboxTemplate) bool { return pool.TemplateID(&t) == name })
	}
	if i < 0 {
		return nil, nil
	}
	return &list[i], nil
}

func (c *Catalog) view(t *extensions.SandboxTemplate) Template {
	v := Template{
		ID: pool.TemplateID(t), Namespace: t.Namespace, Name: pool.TemplateName(t), Object: t.Name, UID: t.UID,
		Build:     t.Labels[barchan.LabelBuild],
		Aliases:   []string{pool.TemplateName(t)},
		Size:      c.SizeOf(&t.Spec.PodTemplate.Spec),
		CreatedAt: t.CreationTimestamp.UTC(),
		UpdatedAt: t.CreationTimestamp.UTC(),
	}
	for _, f := range t.ManagedFields {
		if f.Time != nil && f.Time.After(v.UpdatedAt) {
			v.UpdatedAt = f.Time.UTC()
		}
	}
	if b := t.Spec.Barchan; b != nil {
		v.Public = b.Public
		for _, alias := range append([]string{t.Name}, b.Aliases...) {
			if alias != v.Name {
				v.Aliases = append(v.Aliases, alias)
			}
		}
	}
	return v
}

// SizeOf adds up the limits of a Pod's containers.
func (c *Catalog) SizeOf(pod *corev1.PodSpec) Size {
	var cpu, memory, disk resource.Quantity
	for i := range pod.Containers {
		limits := pod.Containers[i].Resources.Limits
		cpu.Add(limits[corev1.ResourceCPU])
		memory.Add(limits[corev1.ResourceMemory])
		disk.Add(limits[corev1.ResourceEphemeralStorage])
	}
	const mib = 1 << 20
	return Size{
		CPUs:     cmp.Or(int(cpu.Value()), c.DefaultSize.CPUs, 2),
		MemoryMB: cmp.Or(memory.Value()/mib, c.DefaultSize.MemoryMB, 1024),
		DiskMB:   cmp.Or(disk.Value()/mib, c.DefaultSize.DiskMB, 10240),
	}
}
