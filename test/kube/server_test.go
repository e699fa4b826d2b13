package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

// A shared server is started by the first test that needs it.
type shared struct {
	program string // empty: kube-apiserver
	once    sync.Once
	server  *kubecluster.Server
	err     error // of the start
}

var (
	// kube is the server of most tests; each has namespaces of its own.
	kube shared
	// podKube is that of the tests whose controller acts on all sandboxes of a cluster.
	podKube shared
	// oldest is of the oldest release that we support.
	oldest = shared{program: "kube-apiserver-oldest"}
)

func TestMain(m *testing.M) {
	code := m.Run()
	for _, s := range []*shared{&kube, &podKube, &oldest} {
		if s.server == nil {
			continue
		}
		if err := s.server.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func startKube(t *testing.T) *rest.Config {
	t.Helper()
	return kube.start(t)
}

// start returns how an administrator reaches the server, which has our CRDs.
func (s *shared) start(t *testing.T) *rest.Config {
	t.Helper()
	if testing.Short() {
		t.Skip("SKIPPED: starting a kube-apiserver takes time")
	}
	if os.Getenv("TEST_PART") == "fast" {
		t.Skip("SKIPPED: make test-all runs it")
	}
	program := kubecluster.FindProgram(t, cmp.Or(s.program, "kube-apiserver"))
	s.once.Do(func() {
		if s.server, s.err = kubecluster.StartServer(context.Background(), program); s.err != nil {
			return
		}
		s.err = errors.New("CRDs were not installed") // if install fails this test
		install(t, s.server.REST)
		s.err = nil
	})
	if s.err != nil {
		t.Fatal(s.err)
	}
	return rest.CopyConfig(s.server.REST)
}
