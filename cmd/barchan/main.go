// Command barchan is the server and its command line.
package main

import (
	"context"
	"os"

	"github.com/barchan-dev/barchan/internal/client/cli"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// version is set by the linker; see Makefile.
var version string

func main() {
	os.Exit(run())
}

func run() int {
	ctx, stop := terminal.WithSignals(context.Background())
	defer stop()
	return cli.Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, deps())
}
