package netdev

import (
	"context"
	"net"
	"os"
	"testing"
)

// TestMain makes package net probe the host before any test does so in a namespace without IPv6: it
// probes once per process.
func TestMain(m *testing.M) {
	if l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "[::1]:0"); err == nil {
		_ = l.Close()
	}
	os.Exit(m.Run())
}
