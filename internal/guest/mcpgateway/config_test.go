package mcpgateway

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestParse(t *testing.T) {
	got, err := parse(`{"github/b/two": {"runCmd": "b"}, "github/a/one.js": {"installCmd": "i", "runCmd": "a", "envs": {"K": "v"}}}`)
	want := []source{{name: "a/one.js", InstallCmd: "i", RunCmd: "a", Envs: map[string]string{"K": "v"}}, {name: "b/two", RunCmd: "b"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	for text, wants := range map[string]string{
		`[`:                                    "--config: want a JSON object",
		`{"github": {"runCmd": "x"}}`:          "github: servers of Docker's catalog",
		`{"github/a/../b": {"runCmd": "x"}}`:   "github/a/../b: ",
		`{"github/a/..": {"runCmd": "x"}}`:     "github/a/..: ",
		`{"github/-a/b": {"runCmd": "x"}}`:     "github/-a/b: ",
		`{"github/a/b": {"runCmd": " "}}`:      "github/a/b: runCmd: is required",
		`{"github/a/b": {"runCmd": ["x"]}}`:    "github/a/b: json: ",
		`{"github/a/b": {"run": "x"}}`:         `github/a/b: json: unknown field "run"`,
		`{"github/a/b": null}`:                 "github/a/b: runCmd: is required",
		`{"notion": {"internalToken": "abc"}}`: "notion: servers of Docker's catalog",
	} {
		if _, err := parse(text); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), wants) {
			t.Errorf("%s: %v, want %s", text, err, wants)
		}
	}
}
