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

	"github.com/google/uuid"
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
	// TemplatesNamed returns the objects whose template has a name, an alias or an ID.
	TemplatesNamed(ctx context.Context, namespace, name string) ([]extensions.SandboxTemplate, error)
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

// Template is one blueprint as a tenant sees it, with all its tags.
type Template struct {
	// ID is derived from the object's UID, or from the name if a build made it. Object is the name of the object of the tag default,
	// which may not exist.
	ID, Namespace, Name, Object string
	UID                         types.UID
	// Build is the name of the build that last made it; empty for none. It is that of the tag default, or else of the newest one,
	// as UID and Size are.
	Build string
	// Aliases has the name first.
	Aliases              []string
	Public               bool
	Size                 Size
	CreatedAt, UpdatedAt time.Time
	// Tags has default first, and then the others by name.
	Tags []Tag
}

// Tag is one tag of a template.
type Tag struct {
	Name string
	// Build is the name of the build that it refers to; empty for none.
	Build string
	// UID is of the tag's object.
	UID types.UID
	// AssignedAt is when it got the build.
	AssignedAt time.Time
}

// Get returns a template by its name, alias or ID. With a tag, the template must have that.
func (c *Catalog) Get(ctx context.Context, namespace, requested string) (Template, error) {
	ref := parse(namespace, requested)
	for _, source := range ref.from {
		tags, err := c.tags(ctx, source, namespace, ref.name)
		if err != nil {
			return Template{}, err
		}
		if len(tags) > 0 && (!ref.tagged || slices.ContainsFunc(tags, func(t extensions.SandboxTemplate) bool { return ref.Is(&t) })) {
			return c.Group(tags)[0], nil
		}
	}
	return Template{}, NotFound(requested)
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
	for _, source := range sources(namespace) {
		list, err := c.usable(ctx, source, namespace)
		if err != nil {
			return nil, err
		}
		all = append(all, c.Group(list)...)
	}
	all, _ = paging.Cut(all, len(all), nil, paging.Direction(false), position)
	return all, nil
}

// usable lists the templates of a namespace that a tenant may use, each tag by itself.
func (c *Catalog) usable(ctx context.Context, source, tenant string) ([]extensions.SandboxTemplate, error) {
	list, err := c.Cache.Templates(ctx, source)
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	return slices.DeleteFunc(list, func(t extensions.SandboxTemplate) bool { return !Usable(&t, tenant) }), nil
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

// Resolve finds the object of a template's tag. The template is given by name, alias or ID: the tenant's own first, then the
// public ones. A namespace ("team/name") may qualify the name, and a tag, or the ID of the build of one, may follow it.
func (c *Catalog) Resolve(ctx context.Context, namespace, requested string) (*extensions.SandboxTemplate, error) {
	ref := parse(namespace, requested)
	for _, source := range ref.from {
		t, err := c.find(ctx, source, ref, namespace)
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
	ref := parse(namespace, requested)
	object := extensions.TagObject(ref.name, ref.Tag)
	if len(validation.IsDNS1123Subdomain(object)) > 0 {
		return nil, NotFound(requested)
	}
	for _, source := range ref.from {
		t, _, err := c.Cache.CurrentTemplate(ctx, types.NamespacedName{Namespace: source, Name: object})
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return nil, err
		}
		if err == nil && Usable(t, namespace) && ref.Is(t) && named(t, ref.name) {
			return t, nil
		}
	}
	if _, err := c.Get(ctx, namespace, requested); err == nil && !ref.tagged {
		return nil, apistatus.Refuse(errs.ErrNotFound, "template '%s' with tag '%s' not found", requested, ref.Tag)
	}
	return nil, NotFound(requested)
}

// TagRef is a tag as a client writes it, or the ID of the build of one.
type TagRef struct {
	// Tag is in lower case.
	Tag string
	// tagged: the client wrote it.
	tagged bool
}

// Reference returns the tag that a client writes; default if it writes none.
func Reference(tag string, tagged bool) TagRef {
	if !tagged {
		tag = barchan.DefaultTag
	}
	return TagRef{strings.ToLower(tag), tagged}
}

// reference is a tag of a template as a client writes it.
type reference struct {
	TagRef
	name string
	// from are the namespaces to search; none if it is not valid.
	from []string
}

func parse(namespace, requested string) reference {
	ref := reference{from: sources(namespace)}
	name, tag, tagged := strings.Cut(requested, ":")
	ref.name, ref.TagRef = name, Reference(tag, tagged)
	if team, rest, qualified := strings.Cut(ref.name, "/"); qualified {
		if !slices.Contains(ref.from, team) {
			return reference{}
		}
		ref.name, ref.from = rest, []string{team}
	}
	if ref.name == "" || ref.Tag == "" {
		return reference{}
	}
	return ref
}

// Is reports whether an object is the tag, or has the build, that is meant. It ignores the name.
func (r *TagRef) Is(t *extensions.SandboxTemplate) bool {
	_, tag := t.NameAndTag()
	return tag == r.Tag || (r.tagged && t.Labels[barchan.LabelBuild] == r.Tag && uuid.Validate(r.Tag) == nil)
}

// named reports whether an object is a tag of the template of a name.
func named(t *extensions.SandboxTemplate, name string) bool {
	own, _ := t.NameAndTag()
	return own == name
}

// NameIn returns the name of the template that has a name, an alias or an ID; empty if there is none.
func NameIn(list []extensions.SandboxTemplate, name string) string {
	for _, is := range []func(t *extensions.SandboxTemplate) bool{
		func(t *extensions.SandboxTemplate) bool { return named(t, name) },
		func(t *extensions.SandboxTemplate) bool {
			return t.Spec.Barchan != nil && slices.Contains(t.Spec.Barchan.Aliases, name)
		},
		func(t *extensions.SandboxTemplate) bool { return pool.TemplateID(t) == name },
	} {
		for i := range list {
			if is(&list[i]) {
				own, _ := list[i].NameAndTag()
				return own
			}
		}
	}
	return ""
}

// find returns nil if the namespace has no such template for the tenant.
func (c *Catalog) find(ctx context.Context, source string, ref reference, tenant string) (*extensions.SandboxTemplate, error) {
	if object := extensions.TagObject(ref.name, ref.Tag); len(validation.IsDNS1123Subdomain(object)) == 0 {
		t, err := c.Cache.Template(ctx, types.NamespacedName{Namespace: source, Name: object})
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return nil, err
		}
		if err == nil && Usable(t, tenant) && ref.Is(t) && named(t, ref.name) {
			return t, nil
		}
	}
	list, err := c.tags(ctx, source, tenant, ref.name)
	for i := range list {
		if ref.Is(&list[i]) {
			return &list[i], nil
		}
	}
	return nil, err
}

// tags returns the tags of the template of a namespace that has a name, an alias or an ID, as far as the tenant may use them; none if there
// is no such template. What other templates there are does not matter.
func (c *Catalog) tags(ctx context.Context, source, tenant, name string) ([]extensions.SandboxTemplate, error) {
	list, err := c.usableNamed(ctx, source, tenant, name)
	own := NameIn(list, name)
	if err == nil && own != name { // its other tags may have neither the alias nor the ID
		list, err = c.usableNamed(ctx, source, tenant, own)
	}
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	return slices.DeleteFunc(list, func(t extensions.SandboxTemplate) bool { return own == "" || !named(&t, own) }), nil
}

func (c *Catalog) usableNamed(ctx context.Context, source, tenant, name string) ([]extensions.SandboxTemplate, error) {
	list, err := c.Cache.TemplatesNamed(ctx, source, name)
	return slices.DeleteFunc(list, func(t extensions.SandboxTemplate) bool { return !Usable(&t, tenant) }), err
}

// Group returns the templates whose tags are in a list of objects of one namespace, in the order of their first.
func (c *Catalog) Group(list []extensions.SandboxTemplate) (all []Template) {
	of, at := map[string][]*extensions.SandboxTemplate{}, []string{}
	for i := range list {
		name, _ := list[i].NameAndTag()
		if of[name] == nil {
			at = append(at, name)
		}
		of[name] = append(of[name], &list[i])
	}
	for _, name := range at {
		all = append(all, c.view(of[name]))
	}
	return all
}

// view shows the tags of one template.
func (c *Catalog) view(tags []*extensions.SandboxTemplate) Template {
	first := func(t *extensions.SandboxTemplate) string {
		if _, tag := t.NameAndTag(); tag != barchan.DefaultTag {
			return tag
		}
		return "" // before all others
	}
	slices.SortFunc(tags, func(a, b *extensions.SandboxTemplate) int { return cmp.Compare(first(a), first(b)) })
	main := tags[0]
	if first(main) != "" {
		main = slices.MaxFunc(tags, func(a, b *extensions.SandboxTemplate) int { return assignedAt(a).Compare(assignedAt(b)) })
	}
	v := Template{
		ID: pool.TemplateID(main), Namespace: main.Namespace, Name: pool.TemplateName(main), UID: main.UID,
		Build:     main.Labels[barchan.LabelBuild],
		Aliases:   []string{pool.TemplateName(main)},
		Size:      c.SizeOf(&main.Spec.PodTemplate.Spec),
		CreatedAt: main.CreationTimestamp.UTC(),
	}
	v.Object, _ = main.NameAndTag()
	for _, t := range tags {
		_, tag := t.NameAndTag()
		v.Tags = append(v.Tags, Tag{Name: tag, Build: t.Labels[barchan.LabelBuild], UID: t.UID, AssignedAt: assignedAt(t)})
		if t.CreationTimestamp.Time.Before(v.CreatedAt) {
			v.CreatedAt = t.CreationTimestamp.UTC()
		}
		if at := changedAt(t); at.After(v.UpdatedAt) {
			v.UpdatedAt = at
		}
	}
	if b := main.Spec.Barchan; b != nil {
		v.Public = b.Public
		for _, alias := range append([]string{v.Object}, b.Aliases...) {
			if alias != v.Name {
				v.Aliases = append(v.Aliases, alias)
			}
		}
	}
	return v
}

// assignedAt is when a tag got its build.
func assignedAt(t *extensions.SandboxTemplate) time.Time {
	if at := barchan.ExactTime(t, barchan.AnnotationTaggedAt); !at.IsZero() {
		return at.UTC()
	}
	return t.CreationTimestamp.UTC()
}

// changedAt is when an object was last written.
func changedAt(t *extensions.SandboxTemplate) time.Time {
	at := t.CreationTimestamp.UTC()
	for _, f := range t.ManagedFields {
		if f.Time != nil && f.Time.After(at) {
			at = f.Time.UTC()
		}
	}
	return at
}

// SizeOf adds up the limits of a Pod's containers, with the default size where the first has none.
func (c *Catalog) SizeOf(pod *corev1.PodSpec) Size {
	var cpu, memory, disk resource.Quantity
	for i := range pod.Containers {
		limits := pod.Containers[i].Resources.Limits
		if i == 0 && len(pod.Containers) > 1 {
			if limits.Cpu().IsZero() {
				cpu = *resource.NewQuantity(int64(cmp.Or(c.DefaultSize.CPUs, 2)), resource.DecimalSI)
			}
			if limits.Memory().IsZero() {
				memory = *resource.NewQuantity(cmp.Or(c.DefaultSize.MemoryMB, 1024)<<20, resource.BinarySI)
			}
		}
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
