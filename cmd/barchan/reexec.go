package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// reexecVariable marks a server that executed itself again.
const reexecVariable = "BARCHAN_ANEW"

// isReexec reports whether this server started itself again; no process that it starts is told so.
func isReexec() bool {
	_, anew := os.LookupEnv(reexecVariable)
	return anew && os.Unsetenv(reexecVariable) == nil
}

// reexec starts the program in the place of this process, which keeps its ID, its arguments
// and its output, so that whoever started or watches it sees one server. What cannot be done
// otherwise is done so: an etcd that has given up leaves files open and locked. It returns only
// if it fails.
func reexec(cause error) error {
	program, err := os.Executable()
	if err == nil {
		_, err = os.Stat(program)
	}
	if err != nil { // it was replaced while it ran
		program = "/proc/self/exe"
	}
	err = syscall.Exec(program, os.Args, append(os.Environ(), reexecVariable+"=1"))
	return errors.Join(cause, fmt.Errorf("start %s again: %w", program, err))
}
