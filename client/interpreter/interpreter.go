// Package interpreter runs code in sandboxes of the template code-interpreter-v1, as E2B's code interpreter SDK. It keeps no state: contexts are the
// sandbox's.
package interpreter

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/barchan-dev/barchan/client"
)

const (
	// Template is the default template of interpreters.
	Template = "code-interpreter-v1"
	port     = 49999
)

// Options are those of [Run].
type Options struct {
	// ContextID is a context of [NewContext]; empty: the language's own.
	ContextID string `json:"context_id,omitempty"`
	// Language is python by default.
	Language string            `json:"language,omitempty"`
	Env      map[string]string `json:"env_vars,omitempty"`
	// OnStdout, OnStderr and OnResult receive output as it comes; each may be nil.
	OnStdout func(text string)   `json:"-"`
	OnStderr func(text string)   `json:"-"`
	OnResult func(result Result) `json:"-"`
}

// Execution is what a run of code has given.
type Execution struct {
	Results        []Result
	Stdout, Stderr string
	// Error is the code's own; nil: there was none.
	Error *Error
	Count int
}

// Text returns the main result as text, or nothing.
func (e *Execution) Text() string {
	for _, r := range e.Results {
		if r.Main {
			return r.Text
		}
	}
	return ""
}

// Result is a value or a picture. Formats that it does not have are empty.
type Result struct {
	Text       string          `json:"text"`
	HTML       string          `json:"html"`
	Markdown   string          `json:"markdown"`
	SVG        string          `json:"svg"`
	PNG        []byte          `json:"png"`
	JPEG       []byte          `json:"jpeg"`
	LaTeX      string          `json:"latex"`
	JavaScript string          `json:"javascript"`
	JSON       json.RawMessage `json:"json"`
	Data       json.RawMessage `json:"data"`
	Chart      json.RawMessage `json:"chart"`
	// Main is the value of the last expression.
	Main bool `json:"is_main_result"`
}

// Error is an error of the code.
type Error struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

// Error returns its name and value.
func (e *Error) Error() string { return e.Name + ": " + e.Value }

// Context is a kernel of its own.
type Context struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd"`
}

// Run runs code to its end. An error of the code is in the Execution.
func Run(ctx context.Context, s *client.Sandbox, code string, o Options) (*Execution, error) {
	res, err := send(ctx, s, http.MethodPost, "/execute", struct {
		Code string `json:"code"`
		Options
	}{code, o})
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	out := &Execution{}
	for lines := json.NewDecoder(res.Body); ; {
		var l line
		if err := lines.Decode(&l); errors.Is(err, io.EOF) {
			return out, nil
		} else if ctx.Err() != nil {
			return out, context.Cause(ctx)
		} else if err != nil {
			return out, fmt.Errorf("read the execution: %w: %w", err, client.ErrUnavailable)
		}
		if err := out.add(&l, o); err != nil {
			return out, err
		}
		if l.Type == "end_of_execution" {
			return out, nil
		}
	}
}

// line is one line of an execution.
type line struct {
	Type  string `json:"type"`
	Text  string `json:"text"`
	Count int    `json:"execution_count"`
	Error
	raw json.RawMessage
}

// UnmarshalJSON keeps the line itself, whose other fields are a result's.
func (l *line) UnmarshalJSON(b []byte) error {
	type plain line
	l.raw = bytes.Clone(b)
	return json.Unmarshal(b, (*plain)(l))
}

func (e *Execution) add(l *line, o Options) error {
	switch l.Type {
	case "number_of_executions":
		e.Count = l.Count
	case "stdout":
		e.Stdout += l.Text
		if o.OnStdout != nil {
			o.OnStdout(l.Text)
		}
	case "stderr":
		e.Stderr += l.Text
		if o.OnStderr != nil {
			o.OnStderr(l.Text)
		}
	case "error":
		e.Error = &l.Error
	case "result":
		var r Result
		if err := json.Unmarshal(l.raw, &r); err != nil {
			return fmt.Errorf("read a result: %w", err)
		}
		e.Results = append(e.Results, r)
		if o.OnResult != nil {
			o.OnResult(r)
		}
	}
	return nil
}

// NewContext starts a kernel of its own; language and directory may be empty.
func NewContext(ctx context.Context, s *client.Sandbox, language, cwd string) (Context, error) {
	res, err := send(ctx, s, http.MethodPost, "/contexts", struct {
		Language string `json:"language,omitempty"`
		Cwd      string `json:"cwd,omitempty"`
	}{language, cwd})
	if err != nil {
		return Context{}, err
	}
	defer func() { _ = res.Body.Close() }()
	var c Context
	if err := json.NewDecoder(res.Body).Decode(&c); err != nil {
		return c, fmt.Errorf("read the context: %w: %w", err, client.ErrUnavailable)
	}
	return c, nil
}

// RestartContext restarts a kernel, which loses its variables.
func RestartContext(ctx context.Context, s *client.Sandbox, id string) error {
	return finish(send(ctx, s, http.MethodPost, "/contexts/"+url.PathEscape(id)+"/restart", struct{}{}))
}

// DeleteContext ends a kernel.
func DeleteContext(ctx context.Context, s *client.Sandbox, id string) error {
	return finish(send(ctx, s, http.MethodDelete, "/contexts/"+url.PathEscape(id), nil))
}

func finish(res *http.Response, err error) error {
	if err == nil {
		err = res.Body.Close()
	}
	return err
}

// send returns a response of success; the caller closes it.
func send(ctx context.Context, s *client.Sandbox, method, path string, in any) (*http.Response, error) {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
	}
	base, h := s.Address(port)
	req, err := http.NewRequestWithContext(ctx, method, base+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	h.Set("Content-Type", "application/json")
	h.Set("X-Access-Token", s.AgentToken)
	req.Header = h
	res, err := s.Client().Do(req)
	if err != nil {
		return nil, fmt.Errorf("reach the interpreter: %w: %w", err, client.ErrUnavailable)
	}
	if err := client.CheckResponse(res); err != nil {
		return nil, fmt.Errorf("interpreter: %w", err)
	}
	return res, nil
}
