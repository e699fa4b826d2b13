package apiserver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
)

func userInfo(name string) user.Info {
	groups := []string{user.AllAuthenticated}
	if name == UserAdmin {
		groups = append(groups, user.SystemPrivilegedGroup)
	}
	return &user.DefaultInfo{Name: name, Groups: groups}
}

// newAuthenticator recognizes the in-process transports by the request's context, users by their
// tokens, and tenants by their API keys; keys may be nil. A wrong token is refused, not anonymous.
func newAuthenticator(userTokens map[string]string, keys tenancy.KeyFunc) authenticator.Request {
	anonymous := &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}}
	users := map[[sha256.Size]byte]user.Info{} // a hash found by its time says nothing of the token
	for name, token := range userTokens {
		users[sha256.Sum256([]byte(token))] = userInfo(name)
	}
	tokens := bearertoken.New(authenticator.TokenFunc(func(ctx context.Context, token string) (*authenticator.Response, bool, error) {
		if u, ok := users[sha256.Sum256([]byte(token))]; ok {
			return &authenticator.Response{User: u}, true, nil
		}
		if keys == nil {
			return nil, false, nil
		}
		tenant, err := keys(ctx, token)
		switch {
		case errors.Is(err, errs.ErrUnauthenticated):
			return nil, false, nil
		case err != nil:
			return nil, false, fmt.Errorf("look up API key: %w", err)
		}
		return &authenticator.Response{User: tenant.User()}, true, nil
	}))
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if u, ok := userFromTransport(req.Context()); ok {
			return &authenticator.Response{User: u}, true, nil
		}
		if strings.TrimSpace(req.Header.Get("Authorization")) == "" {
			return &authenticator.Response{User: anonymous}, true, nil
		}
		return tokens.AuthenticateRequest(req)
	})
}
