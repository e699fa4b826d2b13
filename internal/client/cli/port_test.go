package cli

import (
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
)

// TestSignedPort: the URL that is printed has the signature that the gateway requires, for the time
// that was requested.
func TestSignedPort(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.add(id2, "paused", nil)
	s.run("", "open", id1, "8000", "--expires", "10m").want(t, 0, ".barchan.localhost:", "public")

	private := false
	s.mu.Lock()
	s.trafficToken = "the token"
	for _, d := range s.sandboxes {
		d.Network = &client.Network{AllowPublicTraffic: &private}
	}
	s.mu.Unlock()
	began := time.Now().Truncate(time.Second)
	got := s.run("", "open", id1, "8000", "--expires", "10m")
	u, err := url.Parse(strings.TrimSpace(got.stdout))
	if err != nil || got.code != 0 || !strings.HasPrefix(u.Host, "8000-"+id1+".barchan.localhost:") || u.Path != "/" {
		t.Fatalf("got %+v, %v", got, err)
	}
	at, err := strconv.ParseInt(u.Query().Get(signedurl.QueryExpires), 10, 64)
	expires := time.Unix(at, 0)
	if err != nil || expires.Before(began.Add(10*time.Minute)) || expires.After(time.Now().Add(10*time.Minute)) {
		t.Errorf("it expires at %s, %v", expires, err)
	}
	if want := signedurl.Query("the token", 8000, expires).Encode(); u.RawQuery != want {
		t.Errorf("query %s, want %s", u.RawQuery, want)
	}
	s.run("", "open", id1, "8000", "--expires", "10m", "--tls").want(t, 0, "https://8000-"+id1+".barchan.localhost:7743/?"+signedurl.QueryExpires, "")

	s.run("", "open", id2, "8000", "--expires", "10m").want(t, 1, "", "is paused")
	s.mu.Lock()
	if s.sandboxes[id2].State != "paused" {
		t.Error("it was resumed")
	}
	s.mu.Unlock()
	s.run("", "open", id1, "8000", "--expires", "0s").want(t, 2, "", "want at least 1s")
	s.run("", "open", id1, "49983", "--expires", "1m").want(t, 2, "", "agent")
	s.run("", "open", id1, "8000", "--expires", "1m", "--forward", "0").want(t, 2, "", "--forward")
}
