package pull

import "testing"

func TestIsLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"127.0.0.1:5000": true, "localhost": true, "localhost:1": true, "[::1]:5000": true, "127.8.8.8": true,
		"registry.test": false, "10.0.0.1:5000": false, "localhost.evil.test": false, "127.0.0.1.evil.test": false,
	} {
		if got := isLoopback(host); got != want {
			t.Errorf("isLoopback(%q) = %v", host, got)
		}
	}
}
