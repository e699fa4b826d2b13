package bundle

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/config"
)

// TestSettingsNotAllowed sets every text and list of the settings, and finds those alone that are allowed.
func TestSettingsNotAllowed(t *testing.T) {
	cfg := config.Default()
	fields := reflect.ValueOf(&cfg).Elem()
	for _, f := range fields.Fields() {
		switch f.Interface().(type) {
		case string:
			f.SetString("PLANTED")
		case []string:
			f.Set(reflect.ValueOf([]string{"PLANTED"}))
		}
	}
	settings := settingsOf(&cfg, nil)
	for key, s := range settings {
		text, err := json.Marshal(s.Value)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "PLANTED") && !slices.Contains(shownSettings, key) {
			t.Errorf("%s is there: %s", key, text)
		}
	}
	for _, key := range shownSettings {
		if _, ok := settings[key]; !ok {
			t.Errorf("%s is no setting", key)
		}
	}
}

func TestRedactForms(t *testing.T) {
	r := &redactor{literals: strings.NewReplacer("literal-secret", redacted)}
	for name, tt := range map[string]struct{ give, want string }{
		"plain text":   {"sandbox iaaa of default/victim: no space left on device", ""},
		"paths":        {"open /var/lib/barchan/node/node.db: timeout", ""},
		"digest":       {"image sha256:" + strings.Repeat("a1", 32), ""},
		"UID":          {"uid=0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", ""},
		"address":      {"dial tcp 10.87.0.2:49983: connection refused", ""},
		"literal":      {"got literal-secret", "got [removed]"},
		"pair":         {"token=abc next=1", "token=[removed] next=1"},
		"JSON":         {`{"apiKey":"a b","n":1}`, `{"apiKey":[removed],"n":1}`},
		"escaped JSON": {`error="{\"password\":\"a b\"}" n=1`, `error="{\"password\":[removed]}" n=1`},
		"header":       {"Authorization: Basic dTpw x", "Authorization: [removed] [removed] x"},
		"URL":          {"get https://u:p@h.example/a/b?c=d: refused", "get https://h.example/[removed] refused"},
		"only user":    {"dial redis://u:p@h:1 failed", "dial redis://h:1 failed"},
		"query":        {"path=/a?sig=x&y=z n=1", "path=/a?[removed] n=1"},
		"PEM":          {"-----BEGIN PRIVATE KEY-----\\nMII\\n-----END PRIVATE KEY-----", "[removed]"},
		"API key":      {"key e2b_0123456789abcdef", "key [removed]"},
		"long run":     {"is " + strings.Repeat("a1", 20), "is [removed]"},
		"JWT":          {"jwt eyJhbGciOi.eyJzdWIi.c2ln", "jwt [removed]"},
	} {
		t.Run(name, func(t *testing.T) {
			want := tt.want
			if want == "" {
				want = tt.give
			}
			if got := r.text(tt.give); got != want {
				t.Errorf("%q becomes %q, want %q", tt.give, got, want)
			}
		})
	}
}

// TestPickCopiesScalarsAlone: a path that ends at a map or a list of maps has nothing.
func TestPickCopiesScalarsAlone(t *testing.T) {
	from := map[string]any{
		"a": map[string]any{"b": "x", "c": "secret"},
		"l": []any{map[string]any{"n": int64(1), "s": "secret"}},
		"m": map[string]any{"secret": "secret"},
	}
	to := map[string]any{}
	for _, path := range []string{"a.b", "l[].n", "l[]", "m", "none.at.all"} {
		pick(to, from, strings.Split(path, "."))
	}
	got, err := json.Marshal(to)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"a":{"b":"x"},"l":[{"n":1}]}`; string(got) != want {
		t.Errorf("picked %s, want %s", got, want)
	}
}
