package credentials

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// TestFailuresAreBounded counts attempts from more addresses than limiters are kept.
func TestFailuresAreBounded(t *testing.T) {
	var f Failures
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	for i := range 3 * ratelimit.MaxLimiters {
		r.RemoteAddr = fmt.Sprintf("10.%d.%d.%d:1", byte(i>>16), byte(i>>8), byte(i))
		_ = f.Count(r)
	}
	if n := f.limiters.Size(); n > 2*ratelimit.MaxLimiters {
		t.Errorf("%d limiters, want at most %d", n, 2*ratelimit.MaxLimiters)
	}
}

func TestClientPrefix(t *testing.T) {
	for remote, want := range map[string]string{
		"192.0.2.1:1000": "192.0.2.1/32", "[::ffff:192.0.2.1]:1000": "192.0.2.1/32",
		"[2001:db8::1:2:3:4]:1": "2001:db8::/64", "[fe80::1%eth0]:1": "fe80::/64", "@": "invalid Prefix",
	} {
		if got := ClientPrefix(remote).String(); got != want {
			t.Errorf("%s: got %s, want %s", remote, got, want)
		}
	}
}

// TestSignedFile counts the work for a signature of no sandbox: it must not grow with the query, and ends after too many.
func TestSignedFile(t *testing.T) {
	tokens, err := sandbox.NewTokens(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	const sandboxes = 1000
	all := func(yield func(route.Route) bool) {
		e := route.Route{}
		e.Access.Secure = true
		for i := range sandboxes {
			e.ID = sandbox.ID(fmt.Sprintf("i%019d", i))
			if !yield(e) {
				return
			}
		}
	}
	forged := "signature=" + url.QueryEscape(envd.Sign("a", envd.OpRead, "", "forged", nil))
	ask := func(query string) (*http.Request, func() (sandbox.ID, error)) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/files?"+query, http.NoBody)
		return r, func() (sandbox.ID, error) { return SignedFile(r, all, tokens) }
	}
	allocated := func(query string) float64 {
		_, find := ask(query)
		return testing.AllocsPerRun(3, func() {
			if _, err := find(); !errors.Is(err, envd.ErrSignatureInvalid) {
				t.Fatalf("%v", err)
			}
		})
	}
	short, long := allocated(forged+"&path=a"), allocated(forged+"&path="+strings.Repeat("a", 16000))
	if long > short+10 {
		t.Errorf("%g allocations for a long path, %g for a short one", long, short)
	}
	for _, query := range []string{forged + strings.Repeat("&a", maxSignedParameters), forged + strings.Repeat("a", maxSignedQuery)} {
		if n := allocated(query); n > 10 {
			t.Errorf("%g allocations for a query that is refused, of %d bytes", n, len(query))
		}
	}
	synctest.Test(t, func(t *testing.T) {
		var failures Failures
		for i := range signatureBurst + 5 {
			r, find := ask(forged)
			_, err := failures.Signature(r, find)
			if refused, tooMany := errors.AsType[*reply.Reply](err); tooMany != (i >= signatureBurst) || tooMany && refused.Status != http.StatusTooManyRequests {
				t.Fatalf("attempt %d: %v", i, err)
			}
		}
	})
}

func BenchmarkSignedFile(b *testing.B) {
	tokens, err := sandbox.NewTokens(make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	all := func(yield func(route.Route) bool) {
		e := route.Route{ID: "i0000000000000000000"}
		e.Access.Secure = true
		for range 1000 {
			if !yield(e) {
				return
			}
		}
	}
	query := "signature=" + url.QueryEscape(envd.Sign("a", envd.OpRead, "", "forged", nil)) + "&path=" + strings.Repeat("a", 15900)
	r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/files?"+query, http.NoBody)
	for b.Loop() {
		_, _ = SignedFile(r, all, tokens)
	}
}
