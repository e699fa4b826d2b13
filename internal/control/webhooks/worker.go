package webhooks

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/events"
)

// batch is how many events are read at once.
const batch = 50

// worker delivers to one webhook, one event at a time.
type worker struct {
	d    *Deliverer
	hook atomic.Pointer[Webhook]
	// wake: there are new events; changed: the webhook is another.
	wake, changed chan struct{}
	stop          context.CancelFunc
}

func (w *Webhook) same(other *Webhook) bool {
	return w.URL == other.URL && w.Secret == other.Secret && w.EnabledAt == other.EnabledAt && slices.Equal(w.Events, other.Events)
}

// run delivers until ctx is done.
func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		wait, err := w.deliverAll(ctx)
		if err != nil && ctx.Err() == nil {
			hook := w.hook.Load()
			w.d.cfg.Log.WarnContext(ctx, "webhook not served", telemetry.Namespace, hook.Namespace, telemetry.Name, hook.Object, telemetry.Error, err)
			wait = backoffMost
		}
		var timer <-chan time.Time
		wake := w.wake
		if wait > 0 { // new events do not cut the backoff short
			timer, wake = time.After(wait), nil
		}
		select {
		case <-ctx.Done():
		case <-timer:
		case <-w.changed:
		case <-wake:
		}
	}
}

// cursor returns how far the webhook is: at first, where the log was when it was made.
func (w *worker) cursor(hook *Webhook) (c events.Cursor, err error) {
	c, ok, err := w.d.cfg.Events.Cursor(hook.UID)
	if err != nil {
		return c, err
	}
	if !ok {
		c = events.Cursor{Namespace: hook.Namespace, EnabledAt: hook.EnabledAt}
		c.Number, err = w.d.cfg.Events.Before(hook.Namespace, hook.CreatedAt)
		return c, err
	}
	if c.EnabledAt != hook.EnabledAt {
		c.EnabledAt, c.Disabled, c.FailingSince, c.Attempts = hook.EnabledAt, "", time.Time{}, 0
	}
	return c, nil
}

// deliverAll delivers what waits, and returns how long to wait after a failure.
func (w *worker) deliverAll(ctx context.Context) (wait time.Duration, err error) {
	c, err := w.cursor(w.hook.Load())
	if err != nil {
		return 0, err
	}
	for c.Disabled == "" {
		list, lost, err := w.d.cfg.Events.After(c.Namespace, c.Number, batch)
		if err != nil || len(list) == 0 {
			return 0, err
		}
		if lost > 0 {
			c.Lost, c.Attempts = c.Lost+lost, 0
		}
		skipped := false
		for _, e := range list {
			hook := w.hook.Load()
			if skipped = !hook.wants(e.Type); skipped {
				c.Number = e.Number
				continue
			}
			if wait, err := w.deliver(ctx, hook, &c, &e); err != nil || wait > 0 || c.Disabled != "" {
				return wait, err
			}
		}
		if skipped {
			if err := w.d.cfg.Events.SetCursor(w.hook.Load().UID, c); err != nil {
				return 0, err
			}
		}
	}
	return 0, nil
}

// deliver sends one event once, and writes the result. wait is how long to wait for the next attempt.
func (w *worker) deliver(ctx context.Context, hook *Webhook, c *events.Cursor, e *events.Numbered) (wait time.Duration, err error) {
	if err := w.d.slots.Acquire(ctx, 1); err != nil {
		return 0, err
	}
	failure := w.d.post(ctx, hook, &e.Event)
	w.d.slots.Release(1)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	if failure == nil {
		w.d.sent.WithLabelValues("ok").Inc()
		failpoint.Reach("webhook/delivered")
		c.Number, c.Attempts, c.FailingSince, c.LastError = e.Number, 0, time.Time{}, ""
		return 0, w.d.cfg.Events.SetCursor(hook.UID, *c)
	}
	w.d.sent.WithLabelValues("error").Inc()
	c.Attempts++
	c.LastError = failure.Error()
	now := time.Now()
	if c.FailingSince.IsZero() {
		c.FailingSince = now.UTC()
	}
	wait = w.d.cfg.Backoff(c.Attempts)
	switch {
	case now.Sub(c.FailingSince) >= disableAfter:
		c.Disabled = fmt.Sprintf("no delivery has succeeded for %s; the last error: %s; enable it again once the receiver answers", disableAfter, c.LastError)
		wait = 0
		w.d.cfg.Log.WarnContext(ctx, "webhook disabled", telemetry.Namespace, hook.Namespace, telemetry.Name, hook.Object, telemetry.Error, failure)
	case c.Attempts >= maxAttempts:
		c.Number, c.Attempts, c.Lost = e.Number, 0, c.Lost+1
	}
	if err := w.d.cfg.Events.SetCursor(hook.UID, *c); err != nil {
		return 0, err
	}
	if c.Disabled != "" {
		return 0, nil
	}
	return wait, nil
}

// Signature returns the signature of a body, as E2B's receivers verify it.
func Signature(secret string, body []byte) string {
	sum := sha256.Sum256(append([]byte(secret), body...))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// post sends an event. The error tells a tenant nothing about the network that it could not see otherwise.
func (d *Deliverer) post(ctx context.Context, hook *Webhook, e *events.Event) error {
	if err := hook.check(d.cfg.Allowed); err != nil {
		text, _ := errs.PublicMessage(err)
		return errors.New(text)
	}
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, hook.URL, bytes.NewReader(body))
	if err != nil {
		return err
	}
	for name, value := range map[string]string{
		"Content-Type": "application/json", "User-Agent": "barchan-webhooks", "e2b-webhook-id": string(hook.UID), "e2b-delivery-id": uuid.NewString(),
		"e2b-signature-version": "v1", "e2b-signature": Signature(hook.Secret, body),
	} {
		req.Header.Set(name, value)
	}
	res, err := d.client.Do(req)
	if err != nil {
		if text, ok := errs.PublicMessage(err); ok {
			return errors.New(text)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("no answer within %s", deliverTime)
		}
		return errors.New("the receiver cannot be reached")
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 64<<10)) // so that the connection is used again
	_ = res.Body.Close()
	if res.StatusCode < 200 || res.StatusCode > 299 {
		return fmt.Errorf("the receiver answered %s", strings.TrimSpace(fmt.Sprint(res.StatusCode, " ", http.StatusText(res.StatusCode))))
	}
	return nil
}
