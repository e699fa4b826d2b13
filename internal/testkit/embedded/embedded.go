// Package embedded runs the embedded API server, with its etcd, for tests.
package embedded

import (
	"testing"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// APIServer starts an API server over an empty directory, without a listener. It runs until the test ends.
func APIServer(t testing.TB) *apiserver.Server {
	t.Helper()
	return Listen(t, "")
}

// Listen is APIServer with a listener at an address, such as 127.0.0.1:0.
func Listen(t testing.TB, address string) *apiserver.Server {
	t.Helper()
	api, err := apiserver.New(apiserver.Config{DataDir: t.TempDir(), Listen: address, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Stop)
	return api
}
