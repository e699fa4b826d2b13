package sshd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// Limits of one session's environment: variables, and bytes of all.
const (
	maxEnv     = 128
	maxEnvSize = 64 << 10
)

// exitFailed is the code of sessions that end for another reason than their program, as of ssh's own failures.
const exitFailed = 255

// connectTime bounds the connection to a port of a sandbox, besides its wake.
const connectTime = 30 * time.Second

var errIdle = errors.New("nothing moved for too long")

// loginShell runs the user's shell: as a login shell, or with the command in $2. What the agent starts has no SHELL.
const loginShell = `s=${SHELL:-}
[ -x "$s" ] || while IFS=: read -r u _ _ _ _ _ p; do [ "$u" = "$USER" ] && s=$p; done </etc/passwd
[ -x "$s" ] || s=/bin/bash
[ -x "$s" ] || s=/bin/sh
export SHELL="$s"
if [ "$1" = shell ]; then exec "$s" -l; fi
exec "$s" -c "$2"`

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// session is a channel that runs one program.
type session struct {
	c    *conn
	ch   ssh.Channel
	env  map[string]string
	size int // of env
	tty  bool

	started bool
	resize  chan envd.TerminalSize
	signals chan processpb.Signal
}

// serveSession serves a session until the client closes it. Its program may end before.
func (c *conn) serveSession(ctx context.Context, offer ssh.NewChannel) {
	ch, reqs, err := offer.Accept()
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancelCause(ctx)
	s := &session{c: c, ch: ch, env: map[string]string{}, resize: make(chan envd.TerminalSize, 1), signals: make(chan processpb.Signal, 8)}
	done := make(chan struct{})
	for r := range reqs {
		ok := s.prepare(r)
		run := s.program(r, &ok)
		if r.WantReply {
			_ = r.Reply(ok, nil) // fails if the client has gone
		}
		if run != nil {
			s.started = true
			go func() {
				defer close(done)
				s.run(ctx, run)
			}()
		}
	}
	cancel(errGone)
	close(s.resize)
	close(s.signals)
	if s.started {
		<-done
	}
	_ = ch.Close() // it may be closed
}

// prepare handles the requests that start nothing.
func (s *session) prepare(r *ssh.Request) bool {
	switch r.Type {
	case "pty-req":
		return !s.started && s.setTerminal(r.Payload)
	case "env":
		return !s.started && s.setVariable(r.Payload)
	case "window-change":
		var m struct{ Cols, Rows, Width, Height uint32 }
		return ssh.Unmarshal(r.Payload, &m) == nil && s.setSize(m.Cols, m.Rows)
	case "signal":
		var m struct{ Name string }
		return ssh.Unmarshal(r.Payload, &m) == nil && s.signal(m.Name)
	case "auth-agent-req@openssh.com":
		s.say("agent forwarding is refused: programs in a sandbox could use the keys")
	case "x11-req":
		s.say("X11 forwarding is refused: programs in a sandbox could read the display")
	}
	return false
}

func (s *session) setTerminal(payload []byte) bool {
	var m struct {
		Term                      string
		Cols, Rows, Width, Height uint32
		Modes                     string
	}
	if ssh.Unmarshal(payload, &m) != nil || len(m.Term) > 256 {
		return false
	}
	if m.Term != "" {
		s.env["TERM"] = m.Term
	}
	s.tty = true
	return s.setSize(m.Cols, m.Rows)
}

// setSize replaces a size that is not set yet.
func (s *session) setSize(cols, rows uint32) bool {
	if cols == 0 || rows == 0 || cols > 1<<16-1 || rows > 1<<16-1 {
		return true // a terminal without a size has the default one
	}
	select {
	case <-s.resize:
	default:
	}
	s.resize <- envd.TerminalSize{Cols: uint16(cols), Rows: uint16(rows)} // this goroutine alone sends
	return true
}

func (s *session) setVariable(payload []byte) bool {
	var m struct{ Name, Value string }
	if ssh.Unmarshal(payload, &m) != nil || !variableName.MatchString(m.Name) {
		return false
	}
	if s.size += len(m.Name) + len(m.Value); s.size > maxEnvSize || len(s.env) >= maxEnv {
		return false
	}
	s.env[m.Name] = m.Value
	return true
}

func (s *session) signal(name string) bool {
	number, known := processpb.Signal_value["SIGNAL_SIG"+name]
	if !known || !s.started {
		return false
	}
	select {
	case s.signals <- processpb.Signal(number):
		return true
	default:
		return false
	}
}

// program returns what a request starts; nil if nothing.
func (s *session) program(r *ssh.Request, ok *bool) func(context.Context, *gateway.Visit) (int, error) {
	var m struct{ Text string }
	switch {
	case s.started:
		return nil
	case r.Type == "shell":
		*ok = true
		return s.exec("shell", "")
	case r.Type == "exec" && ssh.Unmarshal(r.Payload, &m) == nil:
		*ok = true
		return s.exec("exec", m.Text)
	case r.Type == "subsystem" && ssh.Unmarshal(r.Payload, &m) == nil && m.Text == "sftp":
		*ok = true
		return s.sftp
	}
	return nil
}

// run runs a program and reports its end.
func (s *session) run(ctx context.Context, program func(context.Context, *gateway.Visit) (int, error)) {
	code, err := s.visit(ctx, program)
	result := "ok"
	if err != nil && !errors.Is(err, errGone) {
		s.say(s.explain(err, &code))
		result = "failed"
	}
	s.c.s.metrics.channels.WithLabelValues("session", result).Inc()
	_, _ = s.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{uint32(code)})) // fails if the client has gone
	_, _ = s.ch.CloseWrite(), s.ch.Close()
}

func (s *session) visit(ctx context.Context, program func(context.Context, *gateway.Visit) (int, error)) (int, error) {
	v, ctx, cancel, err := s.c.visit(ctx)
	if err != nil {
		return exitFailed, err
	}
	defer v.End()
	defer cancel(nil)
	code, err := program(ctx, v)
	switch {
	case err != nil && ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil && v.Epoch().Ended():
		err = errEnded
	}
	return code, err
}

// explain returns what the user reads of an error, and sets the exit code that belongs to it.
func (s *session) explain(err error, code *int) string {
	*code = exitFailed
	if failed, ok := errors.AsType[*connect.Error](err); ok && failed.Code() != connect.CodeUnavailable {
		if n, err := strconv.Atoi(failed.Meta().Get(envd.HeaderExitCode)); err == nil {
			*code = n
		}
		return failed.Message()
	}
	if refused, ok := errors.AsType[*envd.Error](err); ok {
		if refused.Status == http.StatusNotFound {
			return "the agent of this sandbox is older than SFTP; create the sandbox anew"
		}
		return refused.Message
	}
	return s.c.sentence(err)
}

// say writes a sentence of ours to the client's standard error.
func (s *session) say(text string) {
	end := "\n"
	if s.tty {
		end = "\r\n"
	}
	_, _ = fmt.Fprintf(s.ch.Stderr(), "barchan: %s%s", text, end) // fails if the client has gone
}

// exec returns a program that the user's shell is, or runs.
func (s *session) exec(mode, command string) func(context.Context, *gateway.Visit) (int, error) {
	return func(ctx context.Context, v *gateway.Visit) (int, error) {
		agent, err := v.Agent(s.c.login.user)
		if err != nil {
			return 0, err
		}
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		idle := traffic.NewIdleTimer(s.c.s.cfg.StreamIdle, s.c.s.clock, func() { cancel(errIdle) })
		defer idle.Stop()
		o := envd.ExecOptions{
			Stdin: idle.Reading(s.ch), Stdout: touching{s.ch, idle}, Stderr: touching{s.ch.Stderr(), idle},
			Env: s.variables(), Terminal: s.tty, Resize: s.resize, Signals: s.signals, Hangup: true,
		}
		code, err := agent.Exec(ctx, []string{"/bin/sh", "-c", loginShell, "sh", mode, command}, o)
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return code, err
	}
}

// variables are those of the client, and those of OpenSSH by which programs recognise a session.
func (s *session) variables() map[string]string {
	env := maps.Clone(s.env)
	if host, port, err := net.SplitHostPort(s.c.ssh.RemoteAddr().String()); err == nil {
		env["SSH_CLIENT"] = host + " " + port + " 22"
		env["SSH_CONNECTION"] = host + " " + port + " " + string(s.c.login.id) + " 22"
	}
	return env
}

// sftp connects the session to an SFTP server in the sandbox.
func (s *session) sftp(ctx context.Context, v *gateway.Visit) (int, error) {
	dialing, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	agent, err := v.Dial(dialing, envd.Port)
	if err != nil {
		return 0, err
	}
	nc, err := envd.ConnectSFTP(dialing, agent, v.Token(), s.c.login.user)
	if err != nil {
		return 0, err
	}
	return 0, s.c.join(ctx, s.ch, nc)
}

// touching is a writer that touches a timer with each write.
type touching struct {
	io.Writer
	idle *traffic.IdleTimer
}

// Write implements io.Writer.
func (t touching) Write(b []byte) (int, error) {
	n, err := t.Writer.Write(b)
	t.idle.Touch()
	return n, err
}
