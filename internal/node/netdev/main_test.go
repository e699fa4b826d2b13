package netdev

import (
	"context"
	"net"
	"os"
	"testing"
)

// TestMain has package net find out what this machine can before any test does so from within a
// namespace without IPv6: it asks once, and takes the answer for the whole process.
func TestMain(m *testing.M) {
	if l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "[::1]:0"); err == nil {
		_ = l.Close()
	}
	os.Exit(m.Run())
}
