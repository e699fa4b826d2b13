package mcpgateway

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// Program is the name under which the agent is this program.
	Program = "mcp-gateway"
	// Port serves the protocol, as SDKs expect it.
	Port = 50005
	// TokenFile has the token, as SDKs expect it. Only root may read it.
	TokenFile = "/etc/mcp-gateway/.token"

	tokenVariable = "GATEWAY_ACCESS_TOKEN"
	logFile       = "/var/log/mcp-gateway.log"
	// codeDir has the repositories of servers.
	codeDir = "/opt/mcp-gateway"
)

// Run is the program with its arguments. An error is for the standard error of the SDK's command.
func Run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet(Program, flag.ContinueOnError)
	config := flags.String("config", "", "the servers, as JSON: {\"github/OWNER/REPOSITORY\": {\"installCmd\": \"…\", \"runCmd\": \"…\", \"envs\": {}}}")
	serves := flags.Bool("serve", false, "serve in this process; the start's end is written to descriptor 3")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 && flags.Arg(0) == "pull" { // of TemplateBuilder.addMcpServer
		return unknown(strings.Join(flags.Args()[1:], ", "))
	}
	if flags.NArg() > 0 || *config == "" {
		return fmt.Errorf("want --config with the servers as JSON: %w", errs.ErrInvalid)
	}
	sources, err := parse(*config)
	if err != nil {
		return err
	}
	token := os.Getenv(tokenVariable)
	if token == "" {
		return fmt.Errorf("%s: is required, the token of clients: %w", tokenVariable, errs.ErrInvalid)
	}
	if *serves {
		syscall.CloseOnExec(3) // the servers would keep it open
		return serve(ctx, sources, token, os.NewFile(3, "started"))
	}
	return start(ctx, *config)
}

// start begins a process that serves, and waits until it is ready. It returns why that failed.
func start(ctx context.Context, config string) error {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	started, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = started.Close() }()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/proc/self/exe", "--serve", "--config", config)
	cmd.Args[0] = Program
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // the SDK's command ends before it
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return err
	}
	text, err := io.ReadAll(started)
	switch {
	case err != nil:
		return err
	case string(text) == ready:
		return cmd.Process.Release()
	case len(text) > 0:
		_ = cmd.Wait() // it ends with the same error
		return errors.New(string(text))
	default:
		return fmt.Errorf("the gateway ended: %w; see %s", cmd.Wait(), logFile)
	}
}

// writeToken writes the token for SDKs that connect later.
func writeToken(path, token string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(token), 0o600)
}
