package process

import (
	"context"
	"os"
	"testing"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
)

// A program that is started while the agent stops would never be ended.
func TestNoProgramWhileStopping(t *testing.T) {
	r := spawn.NewReaper()
	r.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	own := account.User{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	_, _, err = r.Spawn(spawn.Command{Argv: []string{"/bin/true"}, Dir: "/", User: own, Files: [3]*os.File{null, null, null}})
	if connect.CodeOf(startError(err)) != connect.CodeUnavailable {
		t.Errorf("a program: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = r.Run(ctx) // releases SIGCHLD
}
