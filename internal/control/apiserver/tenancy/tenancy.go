// Package tenancy has what the API server knows of tenants: which one a request acts for, what one may write, and how much it may have
// in progress. What a tenant may do to which kind is in the rules of the server.
package tenancy

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
)

// Tenant is a namespace that a request acts for, by one of its API keys.
type Tenant struct {
	Namespace string
	// Key is the name of the key's object.
	Key string
	// Scope of the key. The zero value is barchan.ScopeAdmin.
	Scope barchan.KeyScope
}

// KeyFunc returns the tenant of an API key; an error for one that is unknown, revoked or expired.
type KeyFunc func(ctx context.Context, secret string) (Tenant, error)

// ExtraKey is where [Tenant.User] has the name of the key's object.
const ExtraKey = "barchan.dev/api-key"

const (
	extraNamespace = "barchan.dev/namespace"
	extraScope     = "barchan.dev/scope"
	// group stands for all tenants; only the authenticator puts a user into it.
	group = "barchan:tenants"
)

// Group stands for the tenants of one scope in the rules.
func Group(scope barchan.KeyScope) string { return group + ":" + string(scope.OrAdmin()) }

// User is the user that a tenant is authenticated as.
func (t Tenant) User() user.Info {
	return &user.DefaultInfo{
		Name: "barchan:key:" + t.Namespace + ":" + t.Key, Groups: []string{user.AllAuthenticated, group},
		Extra: map[string][]string{extraNamespace: {t.Namespace}, ExtraKey: {t.Key}, extraScope: {string(t.Scope.OrAdmin())}},
	}
}

// OfUser returns the tenant of a user; false if it is none.
func OfUser(u user.Info) (t Tenant, ok bool) {
	namespace, key, scope := u.GetExtra()[extraNamespace], u.GetExtra()[ExtraKey], u.GetExtra()[extraScope]
	if len(namespace) != 1 || len(key) != 1 || len(scope) != 1 {
		return t, false
	}
	return Tenant{namespace[0], key[0], barchan.KeyScope(scope[0])}, true
}

// Of returns the tenant that a request acts for, in a [registry.AdmissionFunc]. Requests of
// the admin and of our own parts act for none.
func Of(ctx context.Context) (t Tenant, ok bool) {
	u, ok := genericapirequest.UserFrom(ctx)
	if !ok {
		return t, false
	}
	return OfUser(u)
}

// EndsInTime refuses an API key, written by a tenant, that ends later than the tenant's own.
func EndsInTime(ctx context.Context, r *registry.Registry, obj runtime.Object) field.ErrorList {
	tenant, isTenant := Of(ctx)
	k, isKey := obj.(*barchan.APIKey)
	if !isTenant || !isKey {
		return nil
	}
	path := field.NewPath("spec", "expiresAt")
	o, err := r.Store("APIKey").Get(genericapirequest.WithNamespace(ctx, tenant.Namespace), tenant.Key, &metav1.GetOptions{})
	if err != nil {
		return field.ErrorList{field.InternalError(path, fmt.Errorf("read the key of this request: %w", err))}
	}
	maker := o.(*barchan.APIKey).Spec.ExpiresAt
	if maker == nil || k.Spec.ExpiresAt != nil && !k.Spec.ExpiresAt.After(maker.Time) {
		return nil
	}
	return field.ErrorList{field.Forbidden(path, "must be set, and not later than "+maker.UTC().Format(time.RFC3339)+", when the key ends that makes this one")}
}
