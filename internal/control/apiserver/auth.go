package apiserver

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func userInfo(name string) user.Info {
	groups := []string{user.AllAuthenticated}
	if name == UserAdmin {
		groups = append(groups, user.SystemPrivilegedGroup)
	}
	return &user.DefaultInfo{Name: name, Groups: groups}
}

// newAuthenticator knows the in-process transports by what they put in the request's context,
// the admin by the token, and tenants by their API keys; keys may be nil. A wrong token is refused,
// never taken for anonymous.
func newAuthenticator(adminToken string, keys KeyFunc) authenticator.Request {
	anonymous := &user.DefaultInfo{Name: user.Anonymous, Groups: []string{user.AllUnauthenticated}}
	admin, want := userInfo(UserAdmin), sha256.Sum256([]byte(adminToken))
	return authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		if u, ok := userFromTransport(req.Context()); ok {
			return &authenticator.Response{User: u}, true, nil
		}
		header := strings.TrimSpace(req.Header.Get("Authorization"))
		if header == "" {
			return &authenticator.Response{User: anonymous}, true, nil
		}
		kind, token, _ := strings.Cut(header, " ")
		if token = strings.TrimSpace(token); token == "" || !strings.EqualFold(kind, "Bearer") {
			return nil, false, nil
		}
		req.Header.Del("Authorization")
		got := sha256.Sum256([]byte(token))
		if adminToken != "" && subtle.ConstantTimeCompare(got[:], want[:]) == 1 {
			return &authenticator.Response{User: admin}, true, nil
		}
		if keys == nil {
			return nil, false, nil
		}
		tenant, err := keys(req.Context(), token)
		switch {
		case errors.Is(err, errs.ErrUnauthenticated):
			return nil, false, nil
		case err != nil:
			return nil, false, fmt.Errorf("look up API key: %w", err)
		}
		return &authenticator.Response{User: tenant.userInfo()}, true, nil
	})
}
