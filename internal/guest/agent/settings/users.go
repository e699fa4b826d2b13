package settings

import (
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
)

// Users finds the user that a request acts as.
type Users struct {
	Accounts account.Database
	Settings *Settings
}

// Of reads the user from the Authorization header of an RPC; the password is an optional group.
func (u Users) Of(h http.Header) (account.User, error) {
	name := ""
	if h.Get("Authorization") != "" {
		user, group, ok := (&http.Request{Header: h}).BasicAuth()
		if !ok {
			return account.User{}, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("authorization: Basic with a user's name is needed"))
		}
		name = user
		if group = strings.TrimSuffix(group, ":"); group != "" {
			name += ":" + group
		}
	}
	acc, err := u.Named(name)
	if err != nil {
		return account.User{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	return acc, nil
}

// Named finds a user by a name or a number, with optional ":group", or the default one.
func (u Users) Named(name string) (account.User, error) {
	if name == "" {
		name, _ = u.Settings.Defaults()
	}
	acc, err := u.Accounts.Resolve(name)
	if err != nil {
		return account.User{}, fmt.Errorf("invalid username: '%s'", name)
	}
	return acc, nil
}
