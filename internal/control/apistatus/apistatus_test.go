package apistatus_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// TestUnavailable: a request that an API server does not answer is to be tried again; one that its caller ended is not.
func TestUnavailable(t *testing.T) {
	for name, tt := range map[string]struct {
		serve func(net.Conn)
		limit time.Duration
		want  error
	}{
		"away":            {want: errs.ErrUnavailable, limit: time.Minute},
		"lost connection": {serve: func(c net.Conn) { _, _ = c.Read(make([]byte, 1)); _ = c.Close() }, want: errs.ErrUnavailable, limit: time.Minute},
		"caller's limit":  {serve: func(net.Conn) {}, limit: time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			address := program.Address(t)
			if tt.serve != nil {
				l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = l.Close() }()
				go func() {
					for c, err := l.Accept(); err == nil; c, err = l.Accept() {
						tt.serve(c)
					}
				}()
			}
			api, err := rest.UnversionedRESTClientFor(&rest.Config{Host: address, ContentConfig: rest.ContentConfig{NegotiatedSerializer: scheme.Codecs}})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), tt.limit)
			defer cancel()
			err = api.Delete().AbsPath("/x").Do(ctx).Error()
			if got := errs.Kind(apistatus.From("delete", err)); err == nil || !errors.Is(got, tt.want) {
				t.Errorf("%v is %v, want %v", err, got, tt.want)
			}
		})
	}
}
