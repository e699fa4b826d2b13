// Command barchan-agent is PID 1 of a sandbox, or, in a container that is not its own, a process beside
// the container's program. See package agent. By the name mcp-gateway it is the program of package mcpgateway.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent"
	"github.com/barchan-dev/barchan/internal/guest/agent/pack"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/mcpgateway"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	program := run
	if filepath.Base(os.Args[0]) == mcpgateway.Program {
		program = gateway
	}
	code := program(ctx)
	stop()
	os.Exit(code)
}

// gateway is the program mcp-gateway. SDKs show its error as it is.
func gateway(ctx context.Context) int {
	if err := mcpgateway.Run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func run(ctx context.Context) int {
	file := flag.String("config", envd.ConfigPath, "path of the configuration")
	version := flag.Bool("version", false, "print the protocol version and exit")
	owners := flag.String(agent.FlagOwners, "", "print whose the sockets of these inodes are and exit")
	packed := flag.String(envd.FlagPack, "", "write an archive of the files of this request (JSON) and exit")
	home := flag.String(agent.FlagSFTP, "", "serve SFTP on standard input and output, in this directory")
	to := flag.String("install", "", "copy this program into this directory and exit")
	detached := flag.String("detach", "", "start an agent with this configuration (JSON) beside the container's program, wait until it\nanswers, and run the command that the arguments name, if any")
	beside := flag.String("beside", "", "be the agent that -detach starts")
	flag.Parse()
	if flag.NArg() > 0 && *detached == "" {
		fmt.Fprintf(os.Stderr, "barchan-agent: unexpected argument %q\n", flag.Arg(0))
		return 2
	}
	if *version {
		fmt.Fprintln(os.Stdout, envd.Version)
		return 0
	}
	if *owners != "" {
		if err := agent.PrintOwners(os.Stdout, *owners); err != nil {
			return fail(err)
		}
		return 0
	}
	switch {
	case *packed != "":
		return result(pack.Run(os.Stdout, os.Stderr, *packed))
	case *home != "":
		return result(agent.ServeSFTP(os.Stdin, os.Stdout, *home))
	case *to != "":
		return result(install(*to))
	case *detached != "":
		err := detach(ctx, *detached)
		if err == nil && flag.NArg() > 0 {
			err = become(flag.Args())
		}
		return result(err)
	}
	// Caught, not ignored: children would inherit that. Neither SIGHUP nor SIGPIPE may end the
	// sandbox.
	unheeded := make(chan os.Signal, 1)
	signal.Notify(unheeded, syscall.SIGHUP, syscall.SIGPIPE)
	defer signal.Stop(unheeded)
	if err := hide(); err != nil {
		return fail(err)
	}
	// It mostly waits. In gVisor, to wake a thread costs more than what the thread then does for a request. See ADR 80.
	runtime.GOMAXPROCS(1)
	a, err := newAgent(*file, *beside)
	if err != nil {
		return fail(err)
	}
	return result(a.Run(ctx))
}

// hide keeps root of the sandbox from tracing the agent and from reading its memory, which has the token. An agent that
// is not root is left as it is, since the kernel would close its own /proc to it.
func hide() error {
	if os.Geteuid() != 0 {
		return nil
	}
	return os.NewSyscallError("prctl", unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0))
}

func newAgent(file, beside string) (*agent.Agent, error) {
	if beside == "" {
		return agent.New(file, os.Stderr)
	}
	cfg, err := envd.ParseConfig(beside)
	if err != nil {
		return nil, err
	}
	return agent.NewBeside(cfg, os.Stderr), nil
}

// result returns the exit code for an error.
func result(err error) int {
	if err != nil {
		return fail(err)
	}
	return 0
}

func fail(err error) int {
	fmt.Fprintf(os.Stderr, "barchan-agent: %v\n", err)
	return 1
}
