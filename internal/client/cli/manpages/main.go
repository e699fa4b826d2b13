// Command manpages writes a manual page of section 1 for each command of barchan into a directory. Releases
// include them; it is not part of any program that users run.
//
//	go run ./internal/client/cli/manpages DIRECTORY VERSION
//
// The date of the pages is SOURCE_DATE_EPOCH, or now.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"

	"github.com/barchan-dev/barchan/internal/client/cli"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "manpages:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return errors.New("usage: manpages DIRECTORY VERSION")
	}
	root := cli.Root()
	root.DisableAutoGenTag = true
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "Barchan " + args[1], Manual: "Barchan"}, args[0])
}
