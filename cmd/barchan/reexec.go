package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// reexecVariable marks a server that executed itself again.
const reexecVariable = "BARCHAN_ANEW"

// isReexec reports whether this server executed itself again, and clears the mark for its children.
func isReexec() bool {
	_, reexec := os.LookupEnv(reexecVariable)
	return reexec && os.Unsetenv(reexecVariable) == nil
}

// reexec replaces this process by its program with execve(2). Process ID, arguments and output stay,
// so that a supervisor sees one server. It is needed where nothing else helps: a failed etcd leaves
// files open and locked. It returns only on failure.
func reexec(cause error) error {
	program, err := os.Executable()
	if err == nil {
		_, err = os.Stat(program)
	}
	if err != nil { // the file was replaced while it ran
		program = "/proc/self/exe"
	}
	err = syscall.Exec(program, os.Args, append(os.Environ(), reexecVariable+"=1"))
	return errors.Join(cause, fmt.Errorf("start %s again: %w", program, err))
}
