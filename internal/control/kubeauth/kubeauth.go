// Package kubeauth authenticates clients of the REST API by tokens of a Kubernetes cluster, such as those of ServiceAccounts, and finds
// out what they may do. The cluster decides both, by a TokenReview and a SubjectAccessReview; this package keeps the
// results for [KeptFor], so that a revoked token or right ends by then.
//
// It knows no API keys, and neither the routes of an API nor what is behind them.
//
// It holds no lock over a request.
package kubeauth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/validation"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

const (
	// Audience is that of tokens for Barchan alone. Tokens for the API server itself are accepted too.
	Audience = "barchan"
	// KeptFor is how long the result of a review is used.
	KeptFor = 10 * time.Second

	// maxToken bounds a token, in bytes.
	maxToken = 16 << 10
	// maxKept bounds the results; beyond it the least recently used are dropped.
	maxKept = 4096
	// maxReviews bounds the reviews at a time. Tokens that do not exist cost one each.
	maxReviews = 16
	// reviewTimeout bounds one review, and the wait for its turn.
	reviewTimeout = 10 * time.Second

	serviceAccountPrefix = "system:serviceaccount:"
)

// Tokens creates TokenReviews; a client of k8s.io/client-go does.
type Tokens interface {
	Create(ctx context.Context, review *authentication.TokenReview, opts metav1.CreateOptions) (*authentication.TokenReview, error)
}

// Accesses creates SubjectAccessReviews; a client of k8s.io/client-go does.
type Accesses interface {
	Create(ctx context.Context, review *authorization.SubjectAccessReview, opts metav1.CreateOptions) (*authorization.SubjectAccessReview, error)
}

// Namespaces reads namespaces from memory; one that it lacks is an errs.ErrNotFound.
type Namespaces interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

// Access is what a request does, in the words of RBAC.
type Access struct {
	Verb     string
	Resource schema.GroupResource
}

// Authorizer is safe for concurrent use. Make it with New.
type Authorizer struct {
	tokens     Tokens
	accesses   Accesses
	namespaces Namespaces

	kept    *cache.LRUExpireCache
	flights singleflight.Group
	turns   chan struct{} // has an element for each review that runs
}

// New starts nothing.
func New(tokens Tokens, accesses Accesses, namespaces Namespaces) *Authorizer {
	return &Authorizer{tokens: tokens, accesses: accesses, namespaces: namespaces, kept: cache.NewLRUExpireCache(maxKept), turns: make(chan struct{}, maxReviews)}
}

// Authorize returns the namespace in which the holder of a key may do something. A key is a token, which belongs to the namespace
// of its ServiceAccount, or TOKEN@NAMESPACE. It fails with errs.ErrUnauthenticated for what the cluster does not accept as a
// token, errs.ErrForbidden without the right, for a namespace without the label of tenants, or without any namespace, and
// errs.ErrUnavailable while the cluster does not answer.
func (a *Authorizer) Authorize(ctx context.Context, key string, access Access) (namespace string, err error) {
	token, namespace, named := strings.Cut(key, "@") // which no token has
	if named && len(validation.IsDNS1123Label(namespace)) > 0 {
		return "", apistatus.Refuse(errs.ErrUnauthenticated, "the API key: %.63q after @ is not the name of a namespace", namespace)
	}
	if token == "" || len(token) > maxToken {
		return "", apistatus.Refuse(errs.ErrUnauthenticated, "the API key is neither one of Barchan nor a token of the cluster")
	}
	sum := sha256.Sum256([]byte(token))
	id := string(sum[:])
	status, err := once(ctx, a, id, func(ctx context.Context) (authentication.TokenReviewStatus, error) { return a.reviewToken(ctx, token) })
	switch {
	case err != nil:
		return "", err
	case !status.Authenticated:
		return "", apistatus.Refuse(errs.ErrUnauthenticated, "the API key is unknown, revoked or expired, and the cluster does not accept it as a token for itself or the audience %s: %s", Audience, cmp.Or(status.Error, "it is unknown"))
	}
	if !named {
		if namespace, named = namespaceOf(status.User.Username); !named {
			return "", apistatus.Refuse(errs.ErrForbidden, "%s belongs to no namespace; append @NAMESPACE to the key", status.User.Username)
		}
	}
	may, err := once(ctx, a, strings.Join([]string{id, namespace, access.Verb, access.Resource.String()}, "\x00"), func(ctx context.Context) (authorization.SubjectAccessReviewStatus, error) {
		return a.reviewAccess(ctx, status.User, namespace, access)
	})
	switch {
	case err != nil:
		return "", err
	case !may.Allowed:
		return "", apistatus.Refuse(errs.ErrForbidden, "%s may not %s %s in namespace %s; a RoleBinding there to a role with that right, such as edit or admin, allows it", status.User.Username, access.Verb, access.Resource, namespace)
	}
	return namespace, a.checkTenant(ctx, namespace)
}

// namespaceOf returns the namespace of a ServiceAccount.
func namespaceOf(user string) (namespace string, ok bool) {
	account, ok := strings.CutPrefix(user, serviceAccountPrefix)
	namespace, _, is := strings.Cut(account, ":")
	return namespace, ok && is
}

// checkTenant refuses namespaces that are not for the REST API.
func (a *Authorizer) checkTenant(ctx context.Context, name string) error {
	n, err := a.namespaces.Namespace(ctx, name)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("read namespace: %w", err)
	}
	if err == nil {
		if _, is := n.Labels[barchan.TenantLabel]; is {
			return nil
		}
	}
	return apistatus.Refuse(errs.ErrForbidden, "namespace %s has no label %s; `kubectl label namespace %s %s=` opens it to the REST API", name, barchan.TenantLabel, name, barchan.TenantLabel)
}

// reviewToken has the cluster authenticate a token, for the audience that it names if that is ours.
func (a *Authorizer) reviewToken(ctx context.Context, token string) (authentication.TokenReviewStatus, error) {
	review := &authentication.TokenReview{Spec: authentication.TokenReviewSpec{Token: token}}
	if slices.Contains(audiencesOf(token), Audience) {
		review.Spec.Audiences = []string{Audience}
	}
	done, err := a.tokens.Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return authentication.TokenReviewStatus{}, unavailable("whether a token is valid", err)
	}
	status := done.Status
	if review.Spec.Audiences != nil && !slices.Contains(status.Audiences, Audience) && status.Authenticated { // a server that knows no audiences
		return authentication.TokenReviewStatus{Error: "it was not checked for its audience"}, nil
	}
	return status, nil
}

// audiencesOf returns the audiences that a JWT names, without any verification: none if the token is no JWT.
func audiencesOf(token string) []string {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return nil
	}
	var many struct{ Aud []string }
	if json.Unmarshal(text, &many) == nil {
		return many.Aud
	}
	var one struct{ Aud string }
	if json.Unmarshal(text, &one) == nil {
		return []string{one.Aud}
	}
	return nil
}

// reviewAccess finds out whether a user has a right.
func (a *Authorizer) reviewAccess(ctx context.Context, user authentication.UserInfo, namespace string, access Access) (authorization.SubjectAccessReviewStatus, error) {
	extra := make(map[string]authorization.ExtraValue, len(user.Extra))
	for key, values := range user.Extra {
		extra[key] = authorization.ExtraValue(values)
	}
	done, err := a.accesses.Create(ctx, &authorization.SubjectAccessReview{Spec: authorization.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		ResourceAttributes: &authorization.ResourceAttributes{Namespace: namespace, Verb: access.Verb, Group: access.Resource.Group, Resource: access.Resource.Resource},
	}}, metav1.CreateOptions{})
	if err != nil {
		return authorization.SubjectAccessReviewStatus{}, unavailable("what a token may do", err)
	}
	return done.Status, nil
}

func unavailable(what string, err error) error {
	return errs.Public(fmt.Errorf("%w: %w", errs.ErrUnavailable, err), "the cluster does not answer "+what+"; try again")
}

// once returns what was kept for an id, or else what f returns. Callers of the same id share one call of f, which outlives a caller that
// does not wait. Errors are not kept.
func once[T any](ctx context.Context, a *Authorizer, id string, f func(context.Context) (T, error)) (v T, err error) {
	if kept, ok := a.kept.Get(id); ok {
		return kept.(T), nil //nolint:forcetypeassert // ids of other types are longer or shorter
	}
	done := a.flights.DoChan(id, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		select {
		case a.turns <- struct{}{}:
			defer func() { <-a.turns }()
		case <-ctx.Done():
			return v, unavailable("in time, as many keys are checked at once", ctx.Err())
		}
		v, err := f(ctx)
		if err == nil {
			a.kept.Add(id, v, KeptFor)
		}
		return v, err
	})
	select {
	case <-ctx.Done():
		return v, fmt.Errorf("wait for a review: %w", context.Cause(ctx))
	case r := <-done:
		return r.Val.(T), r.Err //nolint:forcetypeassert // see above
	}
}
