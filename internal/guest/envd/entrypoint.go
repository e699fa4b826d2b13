package envd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"golang.org/x/time/rate"
)

const (
	// maxLine bounds one encoded line of a log, and keptLog the lines that an agent keeps, in bytes. Agents cut lines at
	// 64 KiB, and keep 1 MiB of each source.
	maxLine = 512 << 10
	keptLog = 4 << 20
	// lineCost is counted for each line beside its text.
	lineCost = 80
	// statesPerSecond bounds the reads of the entrypoint's state while its end is awaited.
	statesPerSecond = 10
)

// Entrypoint reads the state of the template's program.
func (c *Client) Entrypoint(ctx context.Context) (Entrypoint, error) {
	var e Entrypoint
	err := c.call(ctx, http.MethodGet, PathEntrypoint, nil, &e)
	e.Error = cut(e.Error)
	if e.Last != nil {
		e.Last.Error, e.Last.Last = cut(e.Last.Error), nil
	}
	return e, err
}

// AwaitEntrypoint returns the state of the template's program once it has ended. Its error is as that of WatchEntrypoint.
func (c *Client) AwaitEntrypoint(ctx context.Context) (Entrypoint, error) {
	return c.WatchEntrypoint(ctx, func(e Entrypoint) bool { return e.Ended() })
}

// WatchEntrypoint passes the states of the template's program to until, and returns the one for which that is true. It
// reads the state whenever the agent has logged something, which an agent does at each start and end. Its error is ctx's, or
// that of a log that ended before.
func (c *Client) WatchEntrypoint(ctx context.Context, until func(Entrypoint) bool) (Entrypoint, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	logged, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		ended <- c.Logs(ctx, SourceAgent, true, func(LogLine) error {
			select {
			case logged <- struct{}{}:
			default: // the state will be read after this line
			}
			return nil
		})
	}()
	for limit := rate.NewLimiter(statesPerSecond, statesPerSecond); ; {
		if err := limit.Wait(ctx); err != nil {
			return Entrypoint{}, context.Cause(ctx)
		}
		state, err := c.Entrypoint(ctx)
		if err != nil || until(state) {
			return state, err
		}
		select {
		case <-logged:
		case err := <-ended:
			return Entrypoint{}, fmt.Errorf("the agent's log ended: %w", errors.Join(err, io.EOF))
		}
	}
}

// LastOutput returns at most so many of the last bytes that the entrypoint has printed, or of those that can be read.
func (c *Client) LastOutput(ctx context.Context, size int) string {
	var text strings.Builder
	_ = c.Logs(ctx, SourceEntrypoint, false, func(l LogLine) error { // what can be read is returned
		fmt.Fprintln(&text, l.Line)
		return nil
	})
	out := strings.TrimSpace(text.String())
	return strings.ToValidUTF8(out[max(0, len(out)-size):], "")
}

// Logs calls each for every line kept of a source (SourceEntrypoint,
// SourceAgent, or empty for both), oldest first. With follow it continues until
// ctx ends or each returns an error, which it then returns; without, it fails beyond 4 MiB, and after a minute if ctx has
// no deadline. An [Error] of status 503 means that the sandbox was restored from a checkpoint meanwhile.
func (c *Client) Logs(ctx context.Context, source string, follow bool, each func(LogLine) error) error {
	q := url.Values{}
	if follow {
		q.Set("follow", "true")
	} else {
		var cancel context.CancelFunc
		ctx, cancel = withTimeout(ctx, callTimeout)
		defer cancel()
	}
	if source != "" {
		q.Set("source", source)
	}
	res, err := c.send(ctx, http.MethodGet, PathLogs+"?"+q.Encode(), nil, nil)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if err := readLines(res.Body, follow, each); err != nil {
		return err
	}
	if why := res.Trailer.Get(TrailerError); why != "" {
		return &Error{Status: http.StatusServiceUnavailable, Message: cut(why)}
	}
	return nil
}

// readLines decodes lines of JSON to the end of a log, which is bounded if it is not a followed one.
func readLines(log io.Reader, endless bool, each func(LogLine) error) error {
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, maxLine)
	for size := 0; lines.Scan(); {
		var l LogLine
		if err := json.Unmarshal(lines.Bytes(), &l); lines.Err() != nil { // what came of the line before
			break
		} else if err != nil {
			return fmt.Errorf("read log line: %w", err)
		}
		if size += len(l.Line) + lineCost; size > keptLog && !endless {
			return fmt.Errorf("read log: %w", errTooLong)
		}
		if err := each(l); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read log line: %w", err)
	}
	return nil
}
