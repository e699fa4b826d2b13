package apiserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestReachable(t *testing.T) {
	for in, want := range map[string]string{
		"127.0.0.1:1": "127.0.0.1:1", "[::]:1": "127.0.0.1:1", "0.0.0.0:1": "127.0.0.1:1", "10.0.0.1:1": "10.0.0.1:1", "[::1]:1": "[::1]:1",
	} {
		if got := reachable(in); got != want {
			t.Errorf("reachable(%s) = %s, want %s", in, got, want)
		}
	}
}

// serverOf returns a server whose in-process requests go to h.
func serverOf(t *testing.T, h http.HandlerFunc) *Server {
	s := &Server{}
	s.local.Store(&local{drainer: newDrainer(t.Context(), h)})
	return s
}

func send(ctx context.Context, s *Server, target string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://in-process"+target, http.NoBody)
	if err != nil {
		return nil, err
	}
	return s.RESTConfig(UserAdmin).Transport.RoundTrip(req)
}

func TestTransportPlain(t *testing.T) {
	s := serverOf(t, func(w http.ResponseWriter, r *http.Request) {
		u, _ := userFromTransport(r.Context())
		w.Header().Set("X-User", u.GetName())
		w.WriteHeader(http.StatusTeapot)
		_, _ = io.WriteString(w, r.RequestURI)
	})
	resp, err := send(t.Context(), s, "/a?b=c")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusTeapot || string(body) != "/a?b=c" || resp.Header.Get("X-User") != UserAdmin || err != nil {
		t.Errorf("%d %q %v (%v)", resp.StatusCode, body, resp.Header, err)
	}
	_ = resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 1)); !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("a read after close: %v", err)
	}
}

func TestTransportErrors(t *testing.T) {
	s := serverOf(t, func(http.ResponseWriter, *http.Request) { panic("boom") })
	if resp, err := send(t.Context(), s, "/"); err == nil || !strings.Contains(err.Error(), "boom") {
		closeBody(resp)
		t.Errorf("a panic in the handler: %v", err)
	}
	if resp, err := send(t.Context(), &Server{}, "/"); !errors.Is(err, errs.ErrUnavailable) {
		closeBody(resp)
		t.Errorf("a server that does not run: %v", err)
	}
}

func closeBody(r *http.Response) {
	if r != nil {
		_ = r.Body.Close()
	}
}

// TestTransportWatch: a watch streams, waits for a slow reader, and ends from either side.
func TestTransportWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		written, ended := 0, make(chan struct{})
		s := serverOf(t, func(w http.ResponseWriter, r *http.Request) {
			defer close(ended)
			for r.Context().Err() == nil {
				n, err := w.Write(make([]byte, 64<<10))
				written += n
				if err != nil {
					return
				}
			}
		})
		resp, err := send(t.Context(), s, "/?watch=true")
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the handler waits for the reader
		if written < watchBuffer || written > 2*watchBuffer {
			t.Errorf("%d bytes wait for the reader, want about %d", written, watchBuffer)
		}
		if _, err := io.ReadFull(resp.Body, make([]byte, 4*watchBuffer)); err != nil {
			t.Error(err)
		}
		synctest.Wait() // it waits again, in the middle of a write: closing must end that too
		_ = resp.Body.Close()
		<-ended
	})
}

// A watch that has been read to its end keeps no large buffer; what comes later arrives as before.
func TestTransportWatchReleasesItsBuffer(t *testing.T) {
	next := make(chan int)
	s := serverOf(t, func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		for size := range next {
			_, _ = w.Write(bytes.Repeat([]byte{'x'}, size))
		}
	})
	resp, err := send(t.Context(), s, "/?watch=true")
	if err != nil {
		t.Fatal(err)
	}
	defer closeBody(resp)
	defer close(next)
	for _, size := range []int{keptBuffer / 2, 4 * keptBuffer, 1, watchBuffer, 1} {
		next <- size
		got := make([]byte, size)
		if _, err := io.ReadFull(resp.Body, got); err != nil || got[size-1] != 'x' {
			t.Fatalf("read %d bytes: %v", size, err)
		}
		body := resp.Body.(*memResponse)
		body.mu.Lock()
		kept := body.buf.Cap()
		body.mu.Unlock()
		if kept > keptBuffer {
			t.Errorf("a buffer of %d bytes is kept after %d", kept, size)
		}
	}
}

func TestTransportWatchCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serverOf(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if resp, err := send(ctx, s, "/?watch=1"); !errors.Is(err, context.DeadlineExceeded) {
			closeBody(resp)
			t.Errorf("a watch that never answers: %v, want the deadline", err)
		}
	})
}

// TestDrain: watches are cut, what is under way ends, what comes later is refused.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serverOf(t, func(w http.ResponseWriter, r *http.Request) {
			if isWatch(r) {
				_, _ = io.WriteString(w, "first")
				<-r.Context().Done()
				return
			}
			time.Sleep(time.Second)
			_, _ = fmt.Fprint(w, r.Context().Err())
		})
		watching, err := send(t.Context(), s, "/?watch=true")
		if err != nil {
			t.Fatal(err)
		}
		defer closeBody(watching)
		plain := make(chan string, 1)
		go func() {
			resp, err := send(t.Context(), s, "/")
			if err != nil {
				plain <- err.Error()
				return
			}
			defer closeBody(resp)
			body, _ := io.ReadAll(resp.Body)
			plain <- string(body)
		}()
		synctest.Wait()
		begin := time.Now()
		s.local.Load().drain()
		if took := time.Since(begin); took != time.Second {
			t.Errorf("drained after %s, want a second", took)
		}
		if got := <-plain; got != "<nil>" {
			t.Errorf("the request under way got %q", got)
		}
		if body, err := io.ReadAll(watching.Body); string(body) != "first" || err != nil {
			t.Errorf("the watch got %q (%v)", body, err)
		}
		late, err := send(t.Context(), s, "/")
		if err != nil {
			t.Fatal(err)
		}
		defer closeBody(late)
		if late.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("a late request got %d", late.StatusCode)
		}
	})
}
