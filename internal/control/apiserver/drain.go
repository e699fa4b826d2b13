package apiserver

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/waitgroup"
)

// drainer lets a handler's requests end before their storage is closed: once it drains, it
// refuses new requests, cuts watches and waits for the others.
type drainer struct {
	next     http.Handler
	requests waitgroup.SafeWaitGroup
	serving  context.Context //nolint:containedctx // done once it drains
	cut      context.CancelFunc
}

func newDrainer(ctx context.Context, next http.Handler) *drainer {
	d := &drainer{next: next}
	d.serving, d.cut = context.WithCancel(ctx)
	return d
}

// isWatch reports whether a request streams until one side ends it: a watch, a followed log, or
// a connection that switches protocols.
func isWatch(r *http.Request) bool {
	q := r.URL.Query()
	return isTrue(q, "watch") || isTrue(q, "follow") || r.Header.Get("Upgrade") != ""
}

func isTrue(q url.Values, name string) bool {
	b, _ := strconv.ParseBool(q.Get(name))
	return b
}

func (d *drainer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if d.requests.Add(1) != nil {
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the API server is stopping", http.StatusServiceUnavailable)
		return
	}
	defer d.requests.Done()
	if isWatch(r) {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		defer context.AfterFunc(d.serving, cancel)() //nolint:contextcheck // the end of one cuts the other
		r = r.WithContext(ctx)
	}
	d.next.ServeHTTP(w, r)
}

// drain returns when all requests have ended, or after drainTimeout. It is called once.
func (d *drainer) drain() {
	d.cut()
	ended := make(chan struct{})
	go func() { // ends with the requests
		d.requests.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(drainTimeout):
	}
}
