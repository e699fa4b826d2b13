package apiserver

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
)

func userInfo(name string) user.Info {
	groups := []string{user.AllAuthenticated}
	if name == UserAdmin {
		groups = append(groups, user.SystemPrivilegedGroup)
	}
	return &user.DefaultInfo{Name: name, Groups: groups}
}

// newAuthenticator knows the in-process transports by what they put in the request's context,
// and the admin by the token. A wrong token is refused, never taken for anonymous.
func newAuthenticator(adminToken string) authenticator.Request {
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
		got := sha256.Sum256([]byte(strings.TrimSpace(token)))
		match := subtle.ConstantTimeCompare(got[:], want[:]) == 1
		if adminToken == "" || !strings.EqualFold(kind, "Bearer") || !match {
			return nil, false, nil
		}
		req.Header.Del("Authorization")
		return &authenticator.Response{User: admin}, true, nil
	})
}
