package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// stateOf is the letter of a process in /proc.
func stateOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return err.Error()
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	state, _, _ := strings.Cut(rest, " ")
	return state
}

// stoppedChild is stopped by a signal, and continued by another.
func stoppedChild() (func() error, error) {
	c := exec.Command("/bin/sh", "-c", "while read line; do echo $$ $line; done")
	in, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	stop := func() error {
		if err := c.Process.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		return await("the child stops", func() bool { return stateOf(c.Process.Pid) == "T" })
	}
	lines := bufio.NewReader(out)
	return func() error {
		if s := stateOf(c.Process.Pid); s != "T" {
			return fmt.Errorf("the child is %q", s)
		}
		if err := c.Process.Signal(syscall.SIGCONT); err != nil {
			return err
		}
		if _, err := io.WriteString(in, "here\n"); err != nil {
			return err
		}
		if err := within("the child answers", func() error {
			line, err := lines.ReadString('\n')
			if err == nil && line != fmt.Sprintf("%d here\n", c.Process.Pid) {
				err = fmt.Errorf("it returned %q", line)
			}
			return err
		}); err != nil {
			return err
		}
		return stop()
	}, stop()
}

// deadChild has ended with 7, and is not reaped yet.
func deadChild() (func() error, error) {
	var pid int
	die := func() error {
		c := exec.Command("/bin/sh", "-c", "exit 7")
		if err := c.Start(); err != nil {
			return err
		}
		pid = c.Process.Pid
		return await("the child ends", func() bool { return stateOf(pid) == "Z" })
	}
	return func() error {
		if s := stateOf(pid); s != "Z" {
			return fmt.Errorf("the child is %q", s)
		}
		var status unix.WaitStatus
		if got, err := unix.Wait4(pid, &status, unix.WNOHANG, nil); err != nil || got != pid || status.ExitStatus() != 7 {
			return fmt.Errorf("wait has %d, %d: %v", got, status.ExitStatus(), err) //nolint:errorlint // there may be none
		}
		return die()
	}, die()
}

// terminal is a shell at a terminal, with a variable and a size.
func terminal() (func() error, error) {
	c := exec.Command("/bin/bash", "--norc", "-i")
	c.Env = append(os.Environ(), "PS1=")
	f, err := pty.StartWithSize(c, &pty.Winsize{Rows: 33, Cols: 77})
	if err != nil {
		return nil, err
	}
	seen := make(chan string, 1000)
	go func() {
		for lines := bufio.NewScanner(f); lines.Scan(); {
			seen <- lines.Text()
		}
	}()
	if _, err := io.WriteString(f, "word=kept\n"); err != nil {
		return nil, err
	}
	n := 0
	return func() error {
		n++
		if _, err := fmt.Fprintf(f, "echo \"$word\"-%d $(stty size)\n", n); err != nil {
			return err
		}
		want := fmt.Sprintf("kept-%d 33 77", n)
		for end := time.After(patience); ; {
			select {
			case line := <-seen:
				if strings.Contains(line, want) {
					return nil
				}
			case <-end:
				return fmt.Errorf("the shell does not contain %q", want)
			}
		}
	}, nil
}
