package requestbody

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// deadlines is a client's connection that notes what deadlines it is given.
type deadlines struct {
	*httptest.ResponseRecorder
	set int
}

func (d *deadlines) SetReadDeadline(time.Time) error {
	d.set++
	return nil
}

// TestLinger: the deadline for the rest of an unread body is set where there may be such a
// rest, and the connection is closed then; where there is none, it would meet the next request.
func TestLinger(t *testing.T) {
	for name, whole := range map[string]bool{"all has come": true, "more may come": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://x/", http.NoBody)
				if err != nil {
					t.Fatal(err)
				}
				client := &deadlines{ResponseRecorder: httptest.NewRecorder()}
				b := New(r, http.NewResponseController(client), nil, nil)
				b.whole.Store(whole)
				b.Finish()
				time.Sleep(2 * linger)
				synctest.Wait()
				if (client.set == 0) != whole {
					t.Errorf("%d deadlines were set", client.set)
				}
				b.whole.Store(true) // the rest came after all, which does not save the connection
				if closes := b.EndsEarly(); closes == whole {
					t.Errorf("the connection is closed: %v", closes)
				}
			})
		})
	}
}

// TestAbortAfterTheHandler: a connection that closes after the handler has returned must not use its response controller.
func TestAbortAfterTheHandler(t *testing.T) {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://x/", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	r.ProtoMajor = 2
	client := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	bodies := [2]*Body{}
	for i := range bodies {
		bodies[i] = New(r, http.NewResponseController(client), http.Header{}, func(int) {})
		if a, err := bodies[i].Next(); err != nil {
			t.Fatal(err)
		} else if _, err := a.Read(nil); err != nil {
			t.Fatal(err)
		}
	}
	early, late := bodies[0], bodies[1]
	early.Current().Abort()
	if client.set != 1 {
		t.Errorf("abort during the exchange set %d deadlines, want 1", client.set)
	}
	late.Finish()
	late.Current().Abort()
	if client.set != 1 {
		t.Errorf("abort after the exchange set %d deadlines, want none", client.set-1)
	}
}
