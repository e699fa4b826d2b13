package settings

import (
	"path/filepath"
	"reflect"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func TestAccountsOfAnImageWithoutUsers(t *testing.T) {
	none := account.Database{Passwd: filepath.Join(t.TempDir(), "passwd"), Group: filepath.Join(t.TempDir(), "group")}
	for name, give := range map[string]struct {
		cfg  envd.Config
		want account.User
	}{
		"no user named":      {envd.Config{}, account.User{Name: "root", Home: "/", Groups: []uint32{0}}},
		"the program's user": {envd.Config{User: "12:34"}, account.User{Name: "12", UID: 12, GID: 34, Home: "/"}},
		"a user of its own":  {envd.Config{User: "12:34", DefaultUser: "56"}, account.User{Name: "56", UID: 56, Home: "/"}},
	} {
		u := Users{Accounts: none, Settings: New(&give.cfg, none)}
		if got, err := u.Named(""); err != nil || !reflect.DeepEqual(got, give.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, give.want)
		}
		if got, err := u.Named("root"); err != nil || got.UID != 0 {
			t.Errorf("%s: root is %+v, %v", name, got, err)
		}
		if got, err := u.Named("78:90"); err != nil || got.UID != 78 || got.GID != 90 {
			t.Errorf("%s: a number is %+v, %v", name, got, err)
		}
		if got, err := u.Named("nonesuch"); err == nil {
			t.Errorf("%s: an unknown name is %+v", name, got)
		}
	}
}
