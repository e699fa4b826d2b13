package kubeauth

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

var list = Access{"list", schema.GroupResource{Group: "agents.x-k8s.io", Resource: "sandboxes"}}

// cluster answers reviews as an API server does. The real one is in test/kube/cluster.
type cluster struct {
	users    map[string]string // by token
	may      map[string]bool   // "user verb resource namespace"
	ignorant bool              // of audiences
	err      error
	delay    time.Duration

	tokens, accesses atomic.Int64
	asked            atomic.Value // []string
}

func (c *cluster) Namespace(_ context.Context, name string) (*corev1.Namespace, error) {
	switch name {
	case "team", "other":
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{barchan.TenantLabel: ""}}}, nil
	case "plain":
		return &corev1.Namespace{}, nil
	case "broken":
		return nil, errs.ErrUnavailable
	}
	return nil, errs.ErrNotFound
}

type tokens struct{ *cluster }

func (c tokens) Create(ctx context.Context, r *authentication.TokenReview, _ metav1.CreateOptions) (*authentication.TokenReview, error) {
	c.tokens.Add(1)
	c.asked.Store(r.Spec.Audiences)
	if err := c.wait(ctx); err != nil {
		return nil, err
	}
	user, ok := c.users[r.Spec.Token]
	r.Status = authentication.TokenReviewStatus{Authenticated: ok, User: authentication.UserInfo{Username: user, Groups: []string{"g"}}}
	if !ok {
		r.Status.Error = "token has expired"
	} else if !c.ignorant {
		r.Status.Audiences = r.Spec.Audiences
	}
	return r, nil
}

type accesses struct{ *cluster }

func (c accesses) Create(ctx context.Context, r *authorization.SubjectAccessReview, _ metav1.CreateOptions) (*authorization.SubjectAccessReview, error) {
	c.accesses.Add(1)
	if err := c.wait(ctx); err != nil {
		return nil, err
	}
	a := r.Spec.ResourceAttributes
	r.Status.Allowed = c.may[strings.Join([]string{r.Spec.User, a.Verb, a.Resource + "." + a.Group, a.Namespace}, " ")] && slices.Contains(r.Spec.Groups, "g")
	return r, nil
}

func (c *cluster) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(c.delay):
		return c.err
	}
}

const bot = "system:serviceaccount:team:bot"

func newCluster() *cluster {
	return &cluster{
		users: map[string]string{"t": bot, jwt(`"barchan"`): bot, jwt(`["x","barchan"]`): bot, jwt(`"api"`): bot, "human": "jane"},
		may: map[string]bool{
			bot + " list sandboxes.agents.x-k8s.io team": true, bot + " list sandboxes.agents.x-k8s.io other": true,
			bot + " list sandboxes.agents.x-k8s.io plain": true, bot + " list sandboxes.agents.x-k8s.io absent": true,
			bot + " list sandboxes.agents.x-k8s.io broken": true, "jane list sandboxes.agents.x-k8s.io team": true,
		},
	}
}

func (c *cluster) authorizer() *Authorizer { return New(tokens{c}, accesses{c}, c) }

// jwt is a token for an audience, in JSON.
func jwt(audience string) string {
	return "h." + base64.RawURLEncoding.EncodeToString([]byte(`{"aud":`+audience+`}`)) + ".s"
}

func TestAuthorize(t *testing.T) {
	for _, tt := range []struct {
		key    string
		access Access
		want   string // the namespace
		err    error
		text   string
	}{
		{key: "t", want: "team"},
		{key: "t@other", want: "other"},
		{key: "human@team", want: "team"},
		{key: jwt(`"barchan"`), want: "team"},
		{key: jwt(`["x","barchan"]`), want: "team"},
		{key: "human", err: errs.ErrForbidden, text: "jane belongs to no namespace; append @NAMESPACE"},
		{key: "human@other", err: errs.ErrForbidden, text: "jane may not list sandboxes.agents.x-k8s.io in namespace other"},
		{key: "t", access: Access{"create", list.Resource}, err: errs.ErrForbidden, text: bot + " may not create"},
		{key: "t@plain", err: errs.ErrForbidden, text: "kubectl label namespace plain barchan.dev/tenant="},
		{key: "t@absent", err: errs.ErrForbidden, text: "namespace absent has no label"},
		{key: "t@broken", err: errs.ErrUnavailable},
		{key: "unknown", err: errs.ErrUnauthenticated, text: "token has expired"},
		{key: "t@", err: errs.ErrUnauthenticated, text: "after @"},
		{key: "t@a@b", err: errs.ErrUnauthenticated, text: "after @"},
		{key: "@team", err: errs.ErrUnauthenticated},
		{key: strings.Repeat("t", maxToken+1), err: errs.ErrUnauthenticated},
	} {
		access := tt.access
		if access.Verb == "" {
			access = list
		}
		got, err := newCluster().authorizer().Authorize(t.Context(), tt.key, access)
		if err == nil && got != tt.want || !errors.Is(err, tt.err) || tt.text != "" && !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%.40s: %q, %v; want %q, %v %s", tt.key, got, err, tt.want, tt.err, tt.text)
		}
	}
}

// TestAudiences reviews a token for the audience that it names, if that is ours, and for the API server's otherwise.
func TestAudiences(t *testing.T) {
	for key, want := range map[string]string{"t": "[]", jwt(`"api"`): "[]", jwt(`"barchan"`): "[barchan]", jwt(`["x","barchan"]`): "[barchan]", "h.%.s": "[]", "h.e30.s": "[]"} {
		c := newCluster()
		_, _ = c.authorizer().Authorize(t.Context(), key, list)
		if got := fmt.Sprint(c.asked.Load()); got != want {
			t.Errorf("%s: reviewed for %s, want %s", key, got, want)
		}
	}
	c := newCluster()
	c.ignorant = true
	if _, err := c.authorizer().Authorize(t.Context(), jwt(`"barchan"`), list); !errors.Is(err, errs.ErrUnauthenticated) {
		t.Errorf("by a server that checks no audience: %v", err)
	}
}

// TestKept sends one review for many requests, until its result is too old.
func TestKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.delay = time.Second
		a := c.authorizer()
		ask := func(key string, want error) {
			if _, err := a.Authorize(t.Context(), key, list); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", key, err, want)
			}
		}
		check := func(tokens, accesses int64) {
			t.Helper()
			if c.tokens.Load() != tokens || c.accesses.Load() != accesses {
				t.Errorf("%d token reviews and %d of access, want %d and %d", c.tokens.Load(), c.accesses.Load(), tokens, accesses)
			}
		}
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() { ask("t", nil) })
			all.Go(func() { ask("unknown", errs.ErrUnauthenticated) })
		}
		all.Wait()
		check(2, 1)
		ask("t@other", nil)
		check(2, 2)
		time.Sleep(KeptFor - 3*time.Second)
		ask("t", nil)
		check(2, 2)
		delete(c.users, "t")
		time.Sleep(3 * time.Second)
		ask("t", errs.ErrUnauthenticated)
		check(3, 2)
	})
}

// TestUnavailable tells a cluster that does not answer from one that refuses, and keeps no error.
func TestUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.err = errors.New("connection refused")
		a := c.authorizer()
		if _, err := a.Authorize(t.Context(), "t", list); !errors.Is(err, errs.ErrUnavailable) {
			t.Errorf("an error: %v", err)
		}
		synctest.Wait()
		c.err, c.delay = nil, time.Hour
		if _, err := a.Authorize(t.Context(), "t", list); !errors.Is(err, errs.ErrUnavailable) {
			t.Errorf("no answer: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := a.Authorize(ctx, "t", list); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a client that does not wait: %v", err)
		}
		time.Sleep(reviewTimeout)
		synctest.Wait()
		c.delay = 0
		if _, err := a.Authorize(t.Context(), "t", list); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
}

// TestBounds bounds reviews at a time and kept results.
func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.delay = time.Hour
		a := c.authorizer()
		for i := range 3 * maxReviews {
			go func() { _, _ = a.Authorize(t.Context(), fmt.Sprint("unknown", i), list) }()
		}
		synctest.Wait()
		if n := c.tokens.Load(); n != maxReviews {
			t.Errorf("%d reviews at a time, want %d", n, maxReviews)
		}
		time.Sleep(2 * reviewTimeout)
		synctest.Wait()
		c.delay = 0
		for i := range maxKept + 10 {
			_, _ = a.Authorize(t.Context(), fmt.Sprint("unknown", i), list)
		}
		if n := len(a.kept.Keys()); n != maxKept {
			t.Errorf("%d results are kept, want %d", n, maxKept)
		}
	})
}
