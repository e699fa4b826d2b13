package app

import (
	"testing"
)

func TestSandboxAddress(t *testing.T) {
	const id = "iaaa0000000000000001"
	for url, want := range map[string]string{
		"http://127.0.0.1:7700":     "http://127.0.0.1:7700",
		"http://[::1]:7700":         "http://[::1]:7700",
		"http://localhost:7700":     "http://localhost:7700",
		"https://api.sbx.test":      "https://80-" + id + ".sbx.test",
		"https://api.sbx.test:8443": "https://80-" + id + ".sbx.test:8443",
	} {
		base, h := (&Server{URL: url}).SandboxAddress(id, 80)
		if base != want || h.Get("E2b-Sandbox-Id") != id || h.Get("E2b-Sandbox-Port") != "80" {
			t.Errorf("%s: %s %v, want %s", url, base, h, want)
		}
	}
	if base, _ := (&Server{URL: "http://a", SandboxURL: "https://b"}).SandboxAddress(id, 80); base != "https://b" {
		t.Errorf("set: %s", base)
	}
}

func TestDialable(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Dialable("0.0.0.0:80"), "127.0.0.1:80"},
		{Dialable("[::]:80"), "127.0.0.1:80"},
		{Dialable(":80"), "127.0.0.1:80"},
		{Dialable("10.0.0.1:80"), "10.0.0.1:80"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}
