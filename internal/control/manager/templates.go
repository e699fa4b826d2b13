package manager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// Template is one blueprint as a tenant sees it.
type Template struct {
	// ID is derived from the object's UID.
	ID, Namespace, Name string
	UID                 types.UID
	// Aliases holds the name first.
	Aliases              []string
	Public               bool
	Size                 Size
	CreatedAt, UpdatedAt time.Time
}

// Team is a tenant.
type Team struct{ ID, Name string }

// Template returns the template that a tenant means by a name, an alias or an ID.
func (m *Manager) Template(ctx context.Context, namespace, name string) (Template, error) {
	t, err := m.resolve(ctx, namespace, name)
	if err != nil {
		return Template{}, err
	}
	return m.viewTemplate(t), nil
}

// Templates lists a page of what a tenant may use: its own templates and the public ones.
func (m *Manager) Templates(ctx context.Context, namespace string, limit int, cursor string) (page []Template, next string, err error) {
	limit, after, err := paging.Parse(limit, cursor, paging.Direction(false))
	if err != nil {
		return nil, "", err
	}
	all, err := m.AllTemplates(ctx, namespace)
	if err != nil {
		return nil, "", err
	}
	page, next = paging.Cut(all, limit, after, paging.Direction(false), func(t *Template) paging.Cursor {
		return paging.Cursor{Key: t.CreatedAt.UnixNano(), ID: t.ID}
	})
	return page, next, nil
}

// AllTemplates lists what a tenant may use, newest first.
func (m *Manager) AllTemplates(ctx context.Context, namespace string) ([]Template, error) {
	var all []Template
	for _, from := range m.sources(namespace) {
		list, err := m.cache.Templates(ctx, from)
		if err != nil {
			return nil, fmt.Errorf("list templates: %w", err)
		}
		for i := range list {
			if usable(&list[i], namespace) {
				all = append(all, m.viewTemplate(&list[i]))
			}
		}
	}
	all, _ = paging.Cut(all, len(all), nil, paging.Direction(false), func(t *Template) paging.Cursor {
		return paging.Cursor{Key: t.CreatedAt.UnixNano(), ID: t.ID}
	})
	return all, nil
}

// Teams lists the tenants of one identity: exactly its own.
func (m *Manager) Teams(who Identity) []Team {
	return []Team{{ID: who.Namespace, Name: who.Namespace}}
}

// sources are the namespaces where a tenant's templates are looked up, in this order.
func (m *Manager) sources(namespace string) []string {
	if namespace == m.cfg.PublicNamespace {
		return []string{namespace}
	}
	return []string{namespace, m.cfg.PublicNamespace}
}

func usable(t *extensions.SandboxTemplate, namespace string) bool {
	return t.DeletionTimestamp == nil && (t.Namespace == namespace || (t.Spec.Barchan != nil && t.Spec.Barchan.Public))
}

// resolve finds a template by name, alias or ID: the tenant's own first, then the public ones.
// The name may be qualified by the namespace ("team/name") and by the tag "default".
func (m *Manager) resolve(ctx context.Context, namespace, asked string) (*extensions.SandboxTemplate, error) {
	name := strings.TrimSuffix(asked, ":default")
	sources := m.sources(namespace)
	if team, rest, qualified := strings.Cut(name, "/"); qualified {
		if !slices.Contains(sources, team) {
			return nil, noTemplate(asked)
		}
		name, sources = rest, []string{team}
	}
	if name == "" {
		return nil, noTemplate(asked)
	}
	for _, from := range sources {
		t, err := m.templateIn(ctx, from, name, namespace)
		if err != nil {
			return nil, fmt.Errorf("look up template: %w", err)
		}
		if t != nil {
			return t, nil
		}
	}
	return nil, noTemplate(asked)
}

// templateIn returns nil if the namespace has no such template for the tenant.
func (m *Manager) templateIn(ctx context.Context, from, name, tenant string) (*extensions.SandboxTemplate, error) {
	if len(validation.IsDNS1123Subdomain(name)) == 0 {
		t, err := m.cache.Template(ctx, types.NamespacedName{Namespace: from, Name: name})
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return nil, err
		}
		if err == nil && usable(t, tenant) {
			return t, nil
		}
	}
	list, err := m.cache.Templates(ctx, from)
	if err != nil {
		return nil, err
	}
	for _, fits := range []func(*extensions.SandboxTemplate) bool{
		func(t *extensions.SandboxTemplate) bool {
			return t.Spec.Barchan != nil && slices.Contains(t.Spec.Barchan.Aliases, name)
		},
		func(t *extensions.SandboxTemplate) bool { return pool.TemplateID(t) == name },
	} {
		for i := range list {
			if t := &list[i]; usable(t, tenant) && fits(t) {
				return t, nil
			}
		}
	}
	return nil, nil
}

func (m *Manager) viewTemplate(t *extensions.SandboxTemplate) Template {
	v := Template{
		ID: pool.TemplateID(t), Namespace: t.Namespace, Name: pool.TemplateName(t), UID: t.UID,
		Aliases:   []string{pool.TemplateName(t)},
		Size:      m.size(&t.Spec.PodTemplate.Spec),
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
