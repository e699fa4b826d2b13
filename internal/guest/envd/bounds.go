package envd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

const (
	// MaxResponseHeader bounds the header of an agent's response, in bytes.
	MaxResponseHeader = 64 << 10

	// maxAnswer bounds the JSON answer of a route, in bytes.
	maxAnswer = 2 << 20
	// maxPorts bounds the list of what listens in a sandbox, by port and address.
	maxPorts = 1 << 16
	// maxText bounds an error's text and other words of an agent's, in bytes: some get into objects.
	maxText = 1 << 10
	// maxProcessMessage and maxFilesMessage bound a message of an RPC, in bytes. Output comes in chunks of 32 KiB; a list of
	// files is one message, which only command lines read.
	maxProcessMessage = 1 << 20
	maxFilesMessage   = 64 << 20

	// callTimeout bounds a call without a deadline, except one that joins files.
	callTimeout    = time.Minute
	composeTimeout = 30 * time.Minute
)

// withoutRedirects returns a client that sends requests where they were meant to go, and nowhere else: they have the
// agent's token.
func withoutRedirects(c *http.Client) *http.Client {
	own := *c
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &own
}

// withTimeout is context.WithTimeout for a context without a deadline.
func withTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if _, bounded := ctx.Deadline(); bounded {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, limit)
}

// readAnswer decodes a body of JSON.
func readAnswer(body io.Reader, out any) error {
	b, err := io.ReadAll(io.LimitReader(body, maxAnswer+1))
	if err != nil {
		return err
	}
	if len(b) > maxAnswer {
		return fmt.Errorf("it has more than %d bytes", maxAnswer)
	}
	return json.Unmarshal(b, out)
}

// list is a JSON array of at most max items, which an agent could make a hundred times as large in memory as on the wire.
type list[T any] struct {
	items []T
	max   int
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *list[T]) UnmarshalJSON(text []byte) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	if begin, err := dec.Token(); err != nil || begin == nil {
		return err
	} else if begin != json.Delim('[') {
		return errors.New("it is not a list")
	}
	for dec.More() {
		if len(l.items) == l.max {
			return fmt.Errorf("it has more than %d items", l.max)
		}
		var item T
		if err := dec.Decode(&item); err != nil {
			return err
		}
		l.items = append(l.items, item)
	}
	return nil
}

// readError returns what a response other than a success means.
func readError(res *http.Response) error {
	b, err := io.ReadAll(io.LimitReader(res.Body, 64*maxText))
	if err != nil {
		return fmt.Errorf("read error of %d: %w", res.StatusCode, err)
	}
	var e errorBody
	if json.Unmarshal(b, &e) != nil || e.Message == "" {
		e.Message = strings.TrimSpace(string(b))
	}
	return &Error{Status: res.StatusCode, Message: cut(e.Message)}
}

// cut bounds a text of an agent's.
func cut(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "")
}

var (
	errTooLong      = errors.New("it is longer than what an agent keeps")
	errStartedTwice = errors.New("the agent reported two programs for one request")
)
