package builds

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestSecrets(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Dir: t.TempDir()})
	many := map[string][]byte{}
	for i := range maxSecrets + 1 {
		many[fmt.Sprint(i)] = nil
	}
	for name, tt := range map[string]struct {
		give map[string][]byte
		want string
	}{
		"too many":  {many, "secrets: a build has at most"},
		"too large": {map[string][]byte{"a": make([]byte, maxSecret+1)}, "secrets[a]: has more than"},
		"together":  {map[string][]byte{"a": make([]byte, maxSecret), "b": make([]byte, maxSecret), "c": make([]byte, maxSecret)}, "secrets: a build has at most"},
		"path":      {map[string][]byte{"../a": nil}, "secrets[\"../a\"]: an ID must be"},
		"no name":   {map[string][]byte{"": nil}, "an ID must be"},
	} {
		if err := s.SetSecrets("u", tt.give); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(errs.Text(err), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	give := map[string][]byte{"a": []byte("x")}
	if err := s.SetSecrets("u", give); err != nil || string(s.Secrets("u")["a"]) != "x" || s.Secrets("other") != nil {
		t.Errorf("%v, %v", err, s.Secrets("u"))
	}
	var err error
	for i := 0; err == nil && i < 1000; i++ {
		err = s.SetSecrets(types.UID(fmt.Sprint(i)), map[string][]byte{"a": make([]byte, maxSecret), "b": make([]byte, maxSecret)})
	}
	if !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("of too many builds: %v", err)
	}
	s.DropSecrets("0")
	if err := s.SetSecrets("v", give); err != nil || s.Secrets("0") != nil {
		t.Errorf("after another has ended: %v", err)
	}
}
