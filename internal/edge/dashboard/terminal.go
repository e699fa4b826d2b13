package dashboard

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// terminalProtocol is the WebSocket's; the page offers the ticket beside it, since a header is in no log or history.
	terminalProtocol = "barchan.terminal"
	// terminalIdle ends a terminal without input.
	terminalIdle = 30 * time.Minute
	// maxInput bounds one message of a page.
	maxInput    = 64 << 10
	maxTerminal = 1000 // columns or rows
)

// shell is a login shell: bash where there is one.
const shell = `cd; if command -v bash >/dev/null 2>&1; then exec bash -l; fi; exec sh -l`

var errIdle = errors.New("no input for " + terminalIdle.String())

// terminalTicket makes what a WebSocket of this session is opened with.
func (s *Server) terminalTicket(w http.ResponseWriter, r *http.Request, who caller) error {
	o, err := s.find(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	secret, err := s.sessions.Terminal(who.session, string(sandbox.IDOf(o.UID)))
	if err != nil {
		return err
	}
	return writeJSON(w, map[string]string{"ticket": secret, "protocol": terminalProtocol})
}

// terminal runs a shell in a sandbox for a WebSocket. Binary messages are the terminal's bytes, text messages its size.
func (s *Server) terminal(w http.ResponseWriter, r *http.Request, who caller) error {
	o, err := s.find(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	id := sandbox.IDOf(o.UID)
	offered := r.Header.Get("Sec-WebSocket-Protocol")
	if !s.sessions.TakeTerminal(ticketIn(offered), who.session, string(id)) {
		s.record(r, who.Identity, actionOpen, http.StatusForbidden)
		return errs.Public(errs.ErrForbidden, "the terminal's ticket is used up or too old; open it again")
	}
	visit, err := s.cfg.Visit(r.Context(), id)
	if err != nil {
		return visitError(err)
	}
	defer visit.End()
	agent, err := visit.Agent("")
	if err != nil {
		return err
	}
	ws, err := websocket.Accept(hijacked{w, r}, r, &websocket.AcceptOptions{Subprotocols: []string{terminalProtocol}, InsecureSkipVerify: true}) // guard has checked the origin
	if err != nil {
		return errors.Join(errSent, err)
	}
	defer func() { _ = ws.CloseNow() }()
	ws.SetReadLimit(maxInput)
	began := time.Now()
	log := s.Log.With(telemetry.Namespace, who.Namespace, telemetry.Name, who.Key, telemetry.Sandbox, id)
	log.InfoContext(r.Context(), "dashboard terminal opened")
	s.record(r, who.Identity, actionOpen, http.StatusSwitchingProtocols)
	defer s.record(r, who.Identity, actionClose, 0)
	ctx, cancel := s.live(r.Context(), who)
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer context.AfterFunc(ctx, visit.End)()
	visit.Epoch().OnEnd(func() { end(errors.New("the sandbox is paused or has ended")) })
	code, err := runShell(ctx, ws, agent, end)
	log.InfoContext(r.Context(), "dashboard terminal closed", telemetry.Duration, time.Since(began))
	_ = ws.Close(websocket.StatusNormalClosure, closeText(ctx, code, err)) // the page may be gone
	return errSent
}

// ticketIn takes the ticket out of the offered protocols.
func ticketIn(offered string) string {
	for part := range strings.SplitSeq(offered, ",") {
		if text := strings.TrimSpace(part); text != terminalProtocol {
			return text
		}
	}
	return ""
}

// closeText is at most 123 bytes, by RFC 6455.
func closeText(ctx context.Context, code int, err error) string {
	text := "the shell has ended with exit code " + strconv.Itoa(code)
	switch cause := context.Cause(ctx); {
	case cause != nil && !errors.Is(cause, context.Canceled):
		text = cause.Error()
	case err != nil:
		text = errs.Text(agentError(err))
	}
	return text[:min(len(text), 120)]
}

// runShell runs a shell to its end, or to that of ctx, which end is called for when the page has closed the terminal.
func runShell(ctx context.Context, ws *websocket.Conn, agent *envd.Client, end context.CancelCauseFunc) (int, error) {
	in, toShell := io.Pipe()
	sizes := make(chan envd.TerminalSize, 1)
	open := context.WithoutCancel(ctx) // a cancelled read would cut the connection, without a reason
	go func() {
		readTerminal(open, ctx.Done(), ws, toShell, sizes, end)
		_ = toShell.Close()
		close(sizes)
	}()
	out := writer(func(b []byte) (int, error) { return len(b), ws.Write(open, websocket.MessageBinary, b) })
	code, err := agent.Exec(ctx, []string{"/bin/sh", "-c", shell}, envd.ExecOptions{
		Stdin: in, Stdout: out, Stderr: out, Terminal: true, Resize: sizes, Hangup: true, Env: map[string]string{"TERM": "xterm-256color", "COLORTERM": "truecolor"},
	})
	_ = in.CloseWithError(io.EOF)
	return code, err
}

// messages are those of a page; a websocket.Conn has them.
type messages interface {
	Read(ctx context.Context) (websocket.MessageType, []byte, error)
}

// readTerminal passes input on until the page closes the terminal, the shell ends, or nothing comes for too long.
func readTerminal(ctx context.Context, done <-chan struct{}, ws messages, to io.Writer, sizes chan<- envd.TerminalSize, end context.CancelCauseFunc) {
	idle := time.AfterFunc(terminalIdle, func() { end(errIdle) })
	defer idle.Stop()
	for {
		kind, text, err := ws.Read(ctx)
		if err != nil {
			end(nil)
			return
		}
		if kind == websocket.MessageBinary {
			idle.Reset(terminalIdle)
			if _, err := to.Write(text); err != nil {
				return // the shell has ended
			}
			continue
		}
		var size envd.TerminalSize
		if json.Unmarshal(text, &size) == nil && size.Cols > 0 && size.Rows > 0 && size.Cols <= maxTerminal && size.Rows <= maxTerminal {
			select {
			case sizes <- size:
			case <-done:
				return
			}
		}
	}
}

type writer func([]byte) (int, error)

// Write implements io.Writer.
func (w writer) Write(b []byte) (int, error) { return w(b) }

// hijacked gives a connection of the gateway's server away, which otherwise expects requests on it.
type hijacked struct {
	http.ResponseWriter
	r *http.Request
}

// Hijack implements http.Hijacker.
func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	rc := http.NewResponseController(h.ResponseWriter)
	if server.ConnOf(h.r) == nil {
		return rc.Hijack()
	}
	conn, ahead, err := server.Hijack(rc, h.r)
	if err != nil {
		return nil, nil, err
	}
	in := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(ahead), conn), max(len(ahead), 4096))
	_, _ = in.Peek(len(ahead)) // they are there
	return conn, bufio.NewReadWriter(in, bufio.NewWriter(conn)), nil
}
