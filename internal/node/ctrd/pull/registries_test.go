package pull

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

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

// TestRegistriesAreNoWayToTheMachine: a registry that a tenant names may be anywhere, and may send the client anywhere. Nothing is sent to
// the metadata of a cloud, nor, unless the registry is there itself, to the loopback.
func TestRegistriesAreNoWayToTheMachine(t *testing.T) {
	reached := 0
	secret := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached++ }))
	defer secret.Close()
	get := func(host, url string, r Registries) error {
		t.Helper()
		all, err := r.hosts(Credentials{})(host)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := all[0].Client.Do(req)
		if err == nil {
			err = res.Body.Close()
		}
		all[0].Client.CloseIdleConnections()
		return err
	}
	local := strings.Replace(secret.URL, "127.0.0.1", "localhost", 1)
	for _, url := range []string{
		secret.URL, local, "http://169.254.169.254/latest/meta-data/", "http://[fe80::1%25lo]/", "http://168.63.129.16/", "http://100.100.100.200/", "http://192.0.0.192/",
		"http://[fd00:ec2::254]/", "http://[::ffff:169.254.169.254]/", "http://0.0.0.0:1/",
	} {
		if err := get("registry.example.com", url, Registries{}); !errors.Is(err, errs.ErrForbidden) {
			t.Errorf("%s: %v", url, err)
		}
	}
	if reached != 0 {
		t.Errorf("the loopback got %d requests", reached)
	}
	if err := get("127.0.0.1:5000", secret.URL, Registries{}); err != nil {
		t.Errorf("a registry of the loopback: %v", err)
	}
	if err := get("127.0.0.1:5000", "http://169.254.169.254/", Registries{}); !errors.Is(err, errs.ErrForbidden) {
		t.Errorf("the metadata from a registry of the loopback: %v", err)
	}
	mirrored := Registries{Mirrors: map[string][]string{anyRegistry: {secret.URL}}}
	if err := get("registry.example.com", secret.URL, mirrored); err != nil {
		t.Errorf("an operator's mirror: %v", err)
	}
}
