// Command barchan is the server and its command line.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/barchan-dev/barchan/internal/cli"
)

// version is set by the linker; see Makefile.
var version string

func main() {
	os.Exit(run())
}

func run() int {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup has it ignored, and so it stays
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	// A second signal ends the program at once, whatever it still cleans up.
	defer context.AfterFunc(ctx, stop)()
	return cli.Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, deps())
}
