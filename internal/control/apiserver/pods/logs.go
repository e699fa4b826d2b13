package pods

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// logOptions are those of kubectl logs.
type logOptions struct {
	follow, timestamps bool
	since              time.Time
	tail, limit        int64 // negative: all
}

func readLogOptions(q url.Values, now time.Time) (o logOptions, err error) {
	o = logOptions{follow: isTrue(q, "follow"), timestamps: isTrue(q, "timestamps"), tail: -1, limit: -1}
	if isTrue(q, "previous") {
		return o, apierrors.NewBadRequest("previous: is not kept apart; the log has the output of all runs")
	}
	number := func(name string, least int64, to *int64) {
		text := q.Get(name)
		if text == "" {
			return
		}
		n, bad := strconv.ParseInt(text, 10, 64)
		if bad != nil || n < least {
			err = errors.Join(err, fmt.Errorf("%s: %q is not a number of at least %d", name, text, least))
		}
		*to = n
	}
	var seconds int64
	number("tailLines", 0, &o.tail)
	number("limitBytes", 1, &o.limit)
	number("sinceSeconds", 1, &seconds)
	if seconds > 0 {
		o.since = now.Add(-time.Duration(seconds) * time.Second)
	}
	if text := q.Get("sinceTime"); text != "" {
		at, bad := time.Parse(time.RFC3339, text)
		switch {
		case bad != nil:
			err = errors.Join(err, fmt.Errorf("sinceTime: %q is not a time such as 2006-01-02T15:04:05Z", text))
		case seconds > 0:
			err = errors.Join(err, errors.New("sinceTime: is set beside sinceSeconds"))
		}
		o.since = at
	}
	if err != nil {
		return o, apierrors.NewBadRequest(err.Error())
	}
	return o, nil
}

type logLine struct {
	at   time.Time
	text string
}

// logs prints the output of a sandbox's programs.
func (h *host) logs(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error {
	q := req.URL.Query()
	o, err := readLogOptions(q, time.Now())
	if err != nil {
		return err
	}
	container, err := checkContainer(s, q.Get("container"))
	if err != nil {
		return err
	}
	ctx := req.Context()
	kept, err := h.keptLines(ctx, s, container)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain")
	p := &logPrinter{w: w, o: o}
	since := slices.DeleteFunc(slices.Clone(kept), func(x logLine) bool { return x.at.Before(o.since) })
	if o.tail >= 0 {
		since = since[max(0, len(since)-int(o.tail)):]
	}
	for _, x := range since {
		if p.print(x) != nil {
			return nil //nolint:nilerr // the client has gone, or the limit is reached
		}
	}
	_ = http.NewResponseController(w).Flush() // a client that has gone is noticed by the next write
	if o.follow {
		_ = h.follow(ctx, s, container, kept, p) // the response has begun, so no error can be sent
	}
	return nil
}

func (h *host) keptLines(ctx context.Context, s *agents.Sandbox, container string) (lines []logLine, err error) {
	err = h.Logs(ctx, s, container, false, func(at time.Time, text string) error {
		lines = append(lines, logLine{at, text})
		return nil
	})
	return lines, err
}

// follow prints the lines after those in kept. The sandbox first repeats those that it still keeps.
func (h *host) follow(ctx context.Context, s *agents.Sandbox, container string, kept []logLine, p *logPrinter) error {
	next := -1 // index in kept of the next line
	return h.Logs(ctx, s, container, true, func(at time.Time, text string) error {
		if next < 0 {
			next = slices.IndexFunc(kept, func(x logLine) bool { return x.at.Equal(at) && x.text == text })
			if next < 0 {
				next = len(kept)
			}
		}
		if next < len(kept) {
			next++
			return nil
		}
		return p.print(logLine{at, text})
	})
}

// logPrinter writes lines up to a number of bytes.
type logPrinter struct {
	w       http.ResponseWriter
	o       logOptions
	written int64
}

var errEnough = errors.New("the limit is reached")

func (p *logPrinter) print(x logLine) error {
	text := x.text + "\n"
	if p.o.timestamps {
		text = x.at.UTC().Format(time.RFC3339Nano) + " " + text
	}
	var enough error
	if p.o.limit >= 0 && p.written+int64(len(text)) >= p.o.limit {
		text, enough = text[:p.o.limit-p.written], errEnough
	}
	p.written += int64(len(text))
	_, err := io.WriteString(p.w, text)
	if err == nil && p.o.follow {
		err = http.NewResponseController(p.w).Flush()
	}
	return errors.Join(err, enough)
}
