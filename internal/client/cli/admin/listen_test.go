package admin

import (
	"net"
	"testing"
)

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // listens at once
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	err = canListen(t.Context(), l.Addr().String())
	if err == nil || err.Error() != l.Addr().String()+" is in use by another program" {
		t.Errorf("got %v", err)
	}
	if err := canListen(t.Context(), "127.0.0.1:0"); err != nil {
		t.Error(err)
	}
}

func TestFormats(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{quoteShell("it's"), `'it'\''s'`},
		{quoteFish(`a\'`), `'a\\\''`},
		{milli(0.26), "300µs"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}
