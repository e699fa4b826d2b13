// Command barchan is the server and its command line.
package main

import (
	"context"
	"os"
	"runtime/debug"

	"github.com/barchan-dev/barchan/internal/client/cli"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// version is set by the linker; see Makefile.
var version string

func main() {
	os.Exit(run())
}

// commandGC is the garbage of a command before it is collected, in percent of what lives: a list of thousands ends sooner. A server
// that has started sets Go's default again.
const commandGC = 400

func run() int {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(commandGC)
	}
	ctx, stop := terminal.WithSignals(context.Background())
	defer stop()
	return cli.Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, deps())
}
