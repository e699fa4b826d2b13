package dashboard

import (
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
)

// maxPage is what a page that is open may cost the server, in bytes.
const maxPage = 1 << 20

// TestCostOfAPage measures the memory that the process needs for each of ten open lists of 10,000 sandboxes, with
// its connection at both ends; and for a page that reads nothing while all of them change.
func TestCostOfAPage(t *testing.T) {
	const many, pages = 10_000, 10
	s, f := newTestServer(t)
	for i := range many {
		f.boxes = append(f.boxes, box("team", fmt.Sprintf("sandbox-%05d", i), true))
	}
	p, err := s.hub.subscribe("team")
	if err != nil {
		t.Fatal(err)
	}
	before := inUse()
	for _, o := range f.boxes {
		p.add(o, o)
	}
	slow := inUse() - before
	t.Logf("a page that reads nothing while %d sandboxes change costs %d bytes", many, slow)
	if slow > maxPage {
		t.Errorf("want at most %d", maxPage)
	}
	if changed, _ := p.take(); len(changed) != many {
		t.Errorf("%d have changed", len(changed))
	}
	s.hub.unsubscribe(p)

	srv := httptest.NewServer(s)
	defer srv.Close()
	session := signedIn(t, s, "good")
	head := fmt.Sprintf("GET /ui/api/watch HTTP/1.1\r\nHost: ui\r\nCookie: %s=%s\r\n%s: 0\r\n\r\n", session.Name, session.Value, headerPage)

	before = inUse()
	for range pages {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if _, err := io.WriteString(conn, head); err != nil {
			t.Fatal(err)
		}
		var last string
		for text := make([]byte, 4096); !strings.Contains(last, `"synced":true`); {
			n, err := conn.Read(text)
			if err != nil {
				t.Fatalf("before all is sent: %v", err)
			}
			last = last[max(0, len(last)-100):] + string(text[:n])
		}
	}
	each := (inUse() - before) / pages
	t.Logf("an open list of %d sandboxes costs %d bytes", many, each)
	if each > maxPage {
		t.Errorf("want at most %d", maxPage)
	}
}

// inUse is the memory of the heap and of stacks after a collection.
func inUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse) //nolint:gosec // it fits
}
