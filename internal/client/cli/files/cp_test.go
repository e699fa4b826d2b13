package files

import (
	"strings"
	"testing"
)

func TestCutRemote(t *testing.T) {
	for text, want := range map[string]string{
		"i3k:/a":   "i3k /a",
		"i3k:":     "i3k .",
		"i3k-c1:b": "i3k-c1 b",
		"./a:b":    "",
		"/a:b":     "",
		"plain":    "",
		"A:b":      "",
	} {
		id, p, ok := CutRemote(text)
		if got := strings.TrimSpace(id + " " + p); ok != (want != "") || ok && got != want {
			t.Errorf("%s: %q, %v", text, got, ok)
		}
	}
}
