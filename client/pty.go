package client

import (
	"context"
	"io"
	"maps"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// PTY runs shells in terminals of a sandbox.
type PTY struct{ agent *envd.Client }

// PTYOptions are those of a terminal.
type PTYOptions struct {
	// Cols and Rows are its size; zero: 80 by 24.
	Cols, Rows uint16
	// Output receives what the terminal prints, in [Command.Wait]; nil: it is in the result.
	Output io.Writer
	Env    map[string]string
	// Dir is the directory to begin in; empty: the user's home.
	Dir string
}

// Create starts an interactive shell in a terminal. Otherwise it is as [Commands.Start].
func (p *PTY) Create(ctx context.Context, o PTYOptions) (*Command, error) {
	env := map[string]string{"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
	maps.Copy(env, o.Env)
	req := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-i", "-l"}, Envs: env}, Pty: size(o.Cols, o.Rows)}
	if o.Dir != "" {
		req.Process.Cwd = &o.Dir
	}
	return start(ctx, p.agent, req, CommandOptions{Stdout: o.Output})
}

func size(cols, rows uint16) *processpb.PTY {
	if cols == 0 || rows == 0 {
		cols, rows = 80, 24
	}
	return envd.PTY(envd.TerminalSize{Cols: cols, Rows: rows})
}

// Connect follows a terminal that is there; output may be nil, as of [PTYOptions].
func (p *PTY) Connect(ctx context.Context, pid uint32, output io.Writer) (*Command, error) {
	return follow(ctx, p.agent, pid, CommandOptions{Stdout: output})
}

// SendInput writes to a terminal.
func (p *PTY) SendInput(ctx context.Context, pid uint32, data []byte) error {
	return sendInput(ctx, p.agent, pid, &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: data}})
}

// Resize sets the size of a terminal.
func (p *PTY) Resize(ctx context.Context, pid uint32, cols, rows uint16) error {
	_, err := p.agent.Process().Update(ctx, connect.NewRequest(&processpb.UpdateRequest{Process: envd.Selector(pid), Pty: size(cols, rows)}))
	return guestError(ctx, "resize terminal", err)
}

// Kill ends a terminal's shell.
func (p *PTY) Kill(ctx context.Context, pid uint32) error { return kill(ctx, p.agent, pid) }
