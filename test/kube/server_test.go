package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

// kube is the server that all tests share; each has namespaces of its own.
var kube struct {
	once   sync.Once
	server *kubecluster.Server
	err    error // of the start
}

func TestMain(m *testing.M) {
	code := m.Run()
	if kube.server != nil {
		if err := kube.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// startKube returns how an administrator reaches the server, which has our CRDs.
func startKube(t *testing.T) *rest.Config {
	t.Helper()
	if testing.Short() {
		t.Skip("SKIPPED: starting a kube-apiserver takes time")
	}
	if os.Getenv("TEST_PART") == "fast" {
		t.Skip("SKIPPED: make test-all runs it")
	}
	program := kubecluster.FindProgram(t, "kube-apiserver")
	kube.once.Do(func() {
		if kube.server, kube.err = kubecluster.StartServer(context.Background(), program); kube.err != nil {
			return
		}
		kube.err = errors.New("CRDs were not installed") // if install fails this test
		install(t, kube.server.REST)
		kube.err = nil
	})
	if kube.err != nil {
		t.Fatal(kube.err)
	}
	return rest.CopyConfig(kube.server.REST)
}
