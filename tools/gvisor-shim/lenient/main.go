// Command lenient lets gVisor's shim run without the capability CAP_SYS_RESOURCE, which containers
// and some virtual machines lack: where the kernel denies the shim a lower OOM score, the shim keeps
// its score, as the shim of runc does. It changes nothing else, and ends with an error if the source is not
// the one that it knows.
//
//	lenient DIRECTORY    of a copy of module gvisor.dev/gvisor
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

const (
	strict  = "sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil {"
	lenient = "sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil && !os.IsPermission(err) {"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: lenient DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "error: change the shim:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	path := filepath.Join(dir, "pkg", "shim", "v1", "manager.go")
	source, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if bytes.Count(source, []byte(strict)) != 1 {
		return errors.New("the place where it sets its OOM score is not known")
	}
	return os.WriteFile(path, bytes.ReplaceAll(source, []byte(strict), []byte(lenient)), 0o644)
}
