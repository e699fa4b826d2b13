// Command barchan-agent is PID 1 of a sandbox. See package agent.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/barchan-dev/barchan/internal/guest/agent"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx)
	stop()
	os.Exit(code)
}

func run(ctx context.Context) int {
	file := flag.String("config", envd.ConfigPath, "path of the configuration")
	version := flag.Bool("version", false, "print the protocol version and exit")
	owners := flag.String(agent.FlagOwners, "", "print whose the sockets of these inodes are and exit")
	flag.Parse()
	if flag.NArg() > 0 {
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
	// Caught, not ignored: children would inherit that. Neither SIGHUP nor SIGPIPE may end the
	// sandbox.
	unheeded := make(chan os.Signal, 1)
	signal.Notify(unheeded, syscall.SIGHUP, syscall.SIGPIPE)
	defer signal.Stop(unheeded)
	a, err := agent.New(*file, os.Stderr)
	if err != nil {
		return fail(err)
	}
	if err := a.Run(ctx); err != nil {
		return fail(err)
	}
	return 0
}

func fail(err error) int {
	fmt.Fprintf(os.Stderr, "barchan-agent: %v\n", err)
	return 1
}
