package memstore

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestIsAccelerated(t *testing.T) {
	entry := func(name, driver string, priority int) string {
		return fmt.Sprintf("name         : %s\ndriver       : %s\nmodule       : kernel\npriority     : %d\nrefcnt       : 1\n\n", name, driver, priority)
	}
	generic := entry("xts(aes)", "xts(ecb(aes-generic))", 100)
	for _, c := range []struct {
		name, text string
		want       bool
	}{
		{"no cipher", "", false},
		{"built of parts", generic + entry("xts(aes)", "xts(ecb(aes-fixed-time))", 101), false},
		{"x86", generic + entry("xts(aes)", "xts-aes-aesni", 401) + entry("xts(aes)", "xts-aes-vaes-avx512", 800), true},
		{"Arm", entry("xts(aes)", "xts-aes-ce", 300) + generic, true},
		{"not the kernel's choice", entry("xts(aes)", "xts-aes-aesni", 50) + generic, false},
		{"another mode", entry("cbc(aes)", "cbc-aes-aesni", 400) + generic, false},
	} {
		if got := isAccelerated(strings.NewReader(c.text)); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// The kernel of this machine, whatever it has, agrees.
func TestCheap(t *testing.T) {
	got := Cheap()
	if b, err := os.ReadFile("/proc/crypto"); err == nil && got && !strings.Contains(string(b), "xts-aes-") {
		t.Errorf("cheap, but /proc/crypto has no such driver:\n%s", b)
	}
}
