package agent_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// The client's Exec, against the real agent.
func TestExec(t *testing.T) {
	c := start(t, envd.Config{}).client("")
	for name, tc := range map[string]struct {
		script, in     string
		terminal       bool
		code           int
		out, outOfErrs string
	}{
		"both outputs":  {script: "echo out; echo err >&2; exit 3", code: 3, out: "out\n", outOfErrs: "err\n"},
		"input":         {script: "cat", in: "given", out: "given"},
		"unread input":  {script: "exit 0", in: strings.Repeat("x", 1<<20)},
		"signal":        {script: "kill -9 $$", code: 128 + 9},
		"on a terminal": {script: "stty size; echo err >&2; exit 4", terminal: true, code: 4, out: "24 80\r\nerr\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errs bytes.Buffer
			o := envd.ExecOptions{Stdout: &out, Stderr: &errs, Terminal: tc.terminal}
			if tc.in != "" {
				o.Stdin = strings.NewReader(tc.in)
			}
			code, err := c.Exec(t.Context(), []string{"/bin/sh", "-c", tc.script}, o)
			if err != nil || code != tc.code || out.String() != tc.out || errs.String() != tc.outOfErrs {
				t.Errorf("Exec = %d, %v, %q and %q; want %d, %q and %q", code, err, &out, &errs, tc.code, tc.out, tc.outOfErrs)
			}
		})
	}
	if _, err := c.Exec(t.Context(), []string{"/none"}, envd.ExecOptions{}); !envd.IsCode(err, connect.CodeInvalidArgument) {
		t.Errorf("Exec of no program = %v", err)
	}
	t.Run("resize", func(t *testing.T) {
		sizes := make(chan envd.TerminalSize, 1)
		defer close(sizes)
		sizes <- envd.TerminalSize{Cols: 99, Rows: 11}
		code, err := c.Exec(t.Context(), []string{"/bin/sh", "-c", `until [ "$(stty size)" = "11 99" ]; do sleep 0.05; done`},
			envd.ExecOptions{Stdout: io.Discard, Stderr: io.Discard, Terminal: true, Resize: sizes})
		if err != nil || code != 0 {
			t.Errorf("Exec = %d, %v", code, err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := c.Exec(ctx, []string{"/bin/sh", "-c", "echo begun; exec sleep 3600"}, envd.ExecOptions{Stdout: onWrite(func() error { cancel(); return nil })})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Exec = %v, want cancelled", err)
		}
	})
	t.Run("nowhere to write", func(t *testing.T) {
		_, err := c.Exec(t.Context(), []string{"/bin/sh", "-c", "echo begun; exec sleep 3600"}, envd.ExecOptions{Stdout: onWrite(func() error { return io.ErrClosedPipe })})
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("Exec = %v, want the writer's error", err)
		}
	})
	if left := list(t, c); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
}

type onWrite func() error

func (f onWrite) Write(b []byte) (int, error) { return len(b), f() }

// TestEndIsOnePart: the last event of a process, the end of the stream and that of the response come together, since each part that comes
// alone wakes the gateway and the client.
func TestEndIsOnePart(t *testing.T) {
	a := start(t, envd.Config{})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(a.base, "http://"))
	noError(t, err)
	defer func() { _ = conn.Close() }()
	noError(t, conn.SetDeadline(time.Now().Add(eventually.Patience)))
	message := `{"process":{"cmd":"/bin/sh","args":["-c","echo out; sleep 0.2"]}}`
	body := "\x00" + string(binary.BigEndian.AppendUint32(nil, uint32(len(message)))) + message
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\nContent-Length: %d\r\n\r\n%s", processpb.ProcessStartProcedure, len(body), body)
	noError(t, err)
	var parts []string
	for b := make([]byte, 64<<10); len(parts) == 0 || !strings.HasSuffix(parts[len(parts)-1], "0\r\n\r\n"); {
		n, err := conn.Read(b)
		if err != nil {
			t.Fatalf("%v after %q", err, parts)
		}
		parts = append(parts, string(b[:n]))
	}
	if last := parts[len(parts)-1]; !strings.Contains(last, `"end"`) || strings.Contains(last, `"data"`) {
		t.Errorf("the parts are %q; want the end in one, after the output", parts)
	}
}
