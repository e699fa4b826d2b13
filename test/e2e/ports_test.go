package e2e

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestPorts reaches services that listen on one address of their sandbox only: the command line lists
// them with that address, and the gateway serves each.
func TestPorts(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	id, _ := s.keep("base", "true")
	const page = `
import http.server, socket, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(("from " + sys.argv[1]).encode())
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
Server((sys.argv[1], int(sys.argv[2])), Page).serve_forever()
`
	for port, address := range map[int]string{8001: "127.0.0.1", 8002: "::1", 8003: "0.0.0.0"} {
		s.must("exec", id, "--", "sh", "-c", `nohup python3 -c "$0" "$1" "$2" >/dev/null 2>&1 &`, page, address, fmt.Sprint(port))
		eventually.NoError(t, "the service on "+address, func() error {
			status, text, err := s.visit(id, port, "/")
			if err == nil && (status != http.StatusOK || text != "from "+address) {
				err = fmt.Errorf("%d %s", status, text)
			}
			return err
		})
	}
	var list []struct {
		Port    int
		Address string
		PID     int
		Process string
	}
	s.read(&list, "ports", id, "--json")
	got := map[int]string{}
	for _, p := range list {
		got[p.Port] = p.Address
		if p.PID == 0 || p.Process != "python3" {
			t.Errorf("port %d is of process %d %q", p.Port, p.PID, p.Process)
		}
	}
	if len(got) != 3 || got[8001] != "127.0.0.1" || got[8002] != "::1" || got[8003] != "0.0.0.0" {
		t.Errorf("listed: %+v", list)
	}
	if status, text, err := s.visit(id, 8004, "/"); err != nil || status != http.StatusBadGateway {
		t.Errorf("a port without a listener: %d %s, %v", status, text, err)
	}
}
