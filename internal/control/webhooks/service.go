package webhooks

import (
	"context"
	"crypto/rand"
	"errors"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// Objects reads and writes the API server.
type Objects interface {
	List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
	Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error
}

// Service has the webhooks of all tenants. Its fields are required but for Changed. It is safe for concurrent use.
type Service struct {
	Objects Objects
	Quota   *quota.Quotas
	// Allowed are networks beside the public ones that webhooks may reach.
	Allowed []netip.Prefix
	// Changed is called after each change; nil: this process delivers nothing.
	Changed func()
}

// Change has the new values of a webhook's fields; nil leaves one as it is.
type Change struct {
	Name, URL, Secret *string
	Enabled           *bool
	Events            []string
}

// List returns the webhooks of a namespace, or of all if it is empty, oldest first.
func (s *Service) List(ctx context.Context, namespace string) ([]Webhook, error) {
	secrets, err := s.secrets(ctx, namespace)
	if err != nil {
		return nil, err
	}
	all := make([]Webhook, len(secrets))
	for i := range secrets {
		all[i] = read(&secrets[i])
	}
	slices.SortFunc(all, func(a, b Webhook) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return all, nil
}

func (s *Service) secrets(ctx context.Context, namespace string) ([]corev1.Secret, error) {
	var list corev1.SecretList
	if err := s.Objects.List(ctx, &list, client.InNamespace(namespace), client.HasLabels{barchan.LabelWebhook}); err != nil {
		return nil, apistatus.From("list webhooks", err)
	}
	return slices.DeleteFunc(list.Items, func(o corev1.Secret) bool { return !barchan.IsWebhook(&o) || o.DeletionTimestamp != nil }), nil
}

// Get returns a webhook by its ID, or its object's name.
func (s *Service) Get(ctx context.Context, namespace, id string) (Webhook, error) {
	o, err := s.find(ctx, namespace, id)
	if err != nil {
		return Webhook{}, err
	}
	return read(o), nil
}

func (s *Service) find(ctx context.Context, namespace, id string) (*corev1.Secret, error) {
	all, err := s.secrets(ctx, namespace)
	if err != nil {
		return nil, err
	}
	for i := range all {
		if id != "" && (string(all[i].UID) == id || all[i].Name == id) {
			return &all[i], nil
		}
	}
	return nil, apistatus.Refuse(errs.ErrNotFound, "webhook %q not found", id)
}

// Create makes a webhook. It gets the events from then on.
func (s *Service) Create(ctx context.Context, namespace string, c Change) (Webhook, error) {
	w := Webhook{Namespace: namespace, Enabled: true}
	c.apply(&w)
	if err := w.check(s.Allowed); err != nil {
		return Webhook{}, err
	}
	o := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: "webhook-" + strings.ToLower(rand.Text()[:10]), Labels: map[string]string{barchan.LabelWebhook: ""},
		Annotations: map[string]string{barchan.AnnotationCreatedAt: barchan.ExactNow()},
	}}
	w.write(o)
	if err := s.Quota.Create(ctx, s.Objects, o); err != nil {
		return Webhook{}, apistatus.From("create webhook", err)
	}
	failpoint.Reach("webhook/written")
	s.changed()
	return read(o), nil
}

// Update changes the fields that are given. One that is enabled again gets the events that are still kept, from where it was.
func (s *Service) Update(ctx context.Context, namespace, id string, c Change) (Webhook, error) {
	o, err := s.find(ctx, namespace, id)
	if err != nil {
		return Webhook{}, err
	}
	w := read(o)
	c.apply(&w)
	if err := w.check(s.Allowed); err != nil {
		return Webhook{}, err
	}
	w.write(o)
	if c.Enabled != nil && *c.Enabled {
		if o.Annotations == nil {
			o.Annotations = map[string]string{}
		}
		o.Annotations[annotationEnabledAt] = barchan.ExactNow()
	}
	if err := s.Objects.Update(ctx, o); err != nil {
		return Webhook{}, apistatus.From("update webhook", err)
	}
	s.changed()
	return w, nil
}

// Delete removes a webhook. A delivery that has begun may still end.
func (s *Service) Delete(ctx context.Context, namespace, id string) error {
	o, err := s.find(ctx, namespace, id)
	if err != nil {
		return err
	}
	err = s.Objects.Delete(ctx, o, client.Preconditions{UID: &o.UID})
	if errors.Is(apistatus.Kind(err), errs.ErrNotFound) {
		return apistatus.Refuse(errs.ErrNotFound, "webhook %q not found", id)
	}
	if err != nil {
		return apistatus.From("delete webhook", err)
	}
	s.changed()
	return nil
}

func (s *Service) changed() {
	if s.Changed != nil {
		s.Changed()
	}
}
