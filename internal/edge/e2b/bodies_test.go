package e2b

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestBodiesThatDoNotCome has a tenant begin many large bodies: one more of it is refused, and those of others are not.
func TestBodiesThatDoNotCome(t *testing.T) {
	f := newFixture(t)
	var begun []net.Conn
	for range 40 {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(f.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		begun = append(begun, conn)
		if _, err := fmt.Fprintf(conn, "POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n", f.key); err != nil {
			t.Fatal(err)
		}
	}
	status := func(key string) error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/sandboxes", io.MultiReader(strings.NewReader("{}"))) // of unknown length
		if err != nil {
			return err
		}
		req.Header.Set("X-API-Key", key)
		res, err := f.Client().Do(req)
		if err != nil {
			return err
		}
		_ = res.Body.Close()
		if res.StatusCode == http.StatusTooManyRequests {
			return nil
		}
		return fmt.Errorf("status %d", res.StatusCode)
	}
	eventually.NoError(t, "the refusal of one more", func() error { return status(f.key) })
	if status(f.other) == nil {
		t.Error("another tenant is refused")
	}
	for _, conn := range begun {
		_ = conn.Close()
	}
	eventually.NoError(t, "the end of the others", func() error {
		if status(f.key) == nil {
			return fmt.Errorf("it is refused still")
		}
		return nil
	})
}
