package gateway

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/edge/gateway/fastpath"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// drained is a client whose connection the gateway takes over while it closes all fast connections.
type drained struct {
	*httptest.ResponseRecorder
	fast *fastpath.Path
	conn net.Conn
}

func (d *drained) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	d.fast.Drain(true)
	return d.conn, bufio.NewReadWriter(bufio.NewReader(d.conn), bufio.NewWriter(d.conn)), nil
}

// TestDrainMeetsTakeOver: a fast connection without a socket yet has nothing to close, and ends on its own.
func TestDrainMeetsTakeOver(t *testing.T) {
	w := fastPathFixture(t)
	port := backend(t, hello)
	b := w.box("a")
	if status, _ := w.get(b.url(port, "/")); status != http.StatusOK { // there is a connection to the sandbox now
		t.Fatal(status)
	}
	ours, theirs := net.Pipe()
	t.Cleanup(func() { _ = ours.Close() })
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, b.url(port, "/"), http.NoBody)
	r.RequestURI = "/"
	r = r.WithContext(context.WithValue(r.Context(), server.ConnKey{}, &server.Conn{Conn: theirs}))
	w.gateway.ServeHTTP(&drained{httptest.NewRecorder(), w.gateway.fast, theirs}, r)
	if got := answers(t, ours); len(got) != 1 || !strings.HasPrefix(got[0], "200 hello") {
		t.Errorf("got %q", got)
	}
	eventually.True(t, "no fast connection is left", func() bool { return w.fastConnCount() == 0 })
}
