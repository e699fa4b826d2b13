package pods

import (
	"bufio"
	"io"
	"net"
	"testing"
)

// TestCloseUnderAClientThatSends: a client that still sends when the stream ends gets all output, and no
// reset.
func TestCloseUnderAClientThatSends(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	closed := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			closed <- err
			return
		}
		c := &watchedConn{Conn: conn, read: bufio.NewReader(conn), gone: func() {}}
		if _, err := io.WriteString(c, "output"); err != nil {
			t.Errorf("write: %v", err)
		}
		closed <- c.Close()
	}()
	client, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	if _, err := client.Write(make([]byte, 8<<20)); err != nil {
		t.Errorf("send: %v", err)
	}
	if out, err := io.ReadAll(client); string(out) != "output" || err != nil {
		t.Errorf("output is %q, %v", out, err)
	}
	_ = client.Close()
	if err := <-closed; err != nil {
		t.Errorf("close: %v", err)
	}
}
