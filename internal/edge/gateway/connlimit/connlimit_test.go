package connlimit

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestListener(t *testing.T) {
	inner, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := New(inner, 2)
	defer func() { _ = l.Close() }()
	accepted := make(chan net.Conn, 10)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	from := func(address string) net.Conn {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}).DialContext(t.Context(), "tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	from("127.0.0.1")
	first := <-accepted
	from("127.0.0.1")
	second := <-accepted
	defer func() { _ = second.Close() }()
	third := from("127.0.0.1")
	_ = third.SetReadDeadline(time.Now().Add(eventually.Patience))
	if _, err := third.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a third connection of the client: %v, want EOF", err)
	}
	from("127.0.0.2")
	other := <-accepted // another client's
	defer func() { _ = other.Close() }()
	if _, ok := first.(interface{ CloseWrite() error }); !ok {
		t.Error("the connection cannot be half closed")
	}
	_ = first.Close()
	_ = first.Close() // counts once
	from("127.0.0.1")
	if last := <-accepted; last != nil {
		_ = last.Close()
	}
}
