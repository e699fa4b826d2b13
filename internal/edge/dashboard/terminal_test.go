package dashboard

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// typist sends a text after each pause, and then nothing more.
type typist struct {
	pauses []time.Duration
	kind   websocket.MessageType
	text   string
}

// Read implements messages.
func (p *typist) Read(ctx context.Context) (websocket.MessageType, []byte, error) {
	if len(p.pauses) == 0 {
		<-ctx.Done()
		return 0, nil, ctx.Err()
	}
	time.Sleep(p.pauses[0])
	p.pauses = p.pauses[1:]
	return p.kind, []byte(p.text), nil
}

// TestIdleTerminal: a terminal ends after half an hour without input; a size that the browser sends is no input.
func TestIdleTerminal(t *testing.T) {
	for name, tt := range map[string]struct {
		in   typist
		ends time.Duration
		text string
	}{
		"silent": {typist{}, 30 * time.Minute, ""},
		"typed":  {typist{[]time.Duration{29 * time.Minute, 29 * time.Minute}, websocket.MessageBinary, "x"}, 88 * time.Minute, "xx"},
		"sizes":  {typist{[]time.Duration{20 * time.Minute}, websocket.MessageText, `{"cols":80,"rows":24}`}, 30 * time.Minute, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, end := context.WithCancelCause(t.Context())
				var to bytes.Buffer
				began := time.Now()
				go readTerminal(ctx, ctx.Done(), &tt.in, &to, make(chan envd.TerminalSize, 1), end)
				<-ctx.Done()
				if cause := context.Cause(ctx); !errors.Is(cause, errIdle) || time.Since(began) != tt.ends || to.String() != tt.text {
					t.Errorf("it ended by %v after %s, having taken %q; want %s and %q", cause, time.Since(began), to.String(), tt.ends, tt.text)
				}
			})
		})
	}
}
