package oci

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// consoleSize is the maximum output of a container, in bytes.
const consoleSize = 16 << 10

// Console is the output of a container's first process: memory of a fixed size, so that no program
// can fill a disk, which exists until all holders have closed it.
type Console struct {
	null, out *os.File
}

// NewConsole creates an empty console.
func NewConsole() (*Console, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("create console: %w", err)
	}
	fd, err := unix.MemfdCreate("console", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		_ = null.Close()
		return nil, fmt.Errorf("create console: %w", err)
	}
	c := &Console{null: null, out: os.NewFile(uintptr(fd), "console")}
	if err := unix.Ftruncate(fd, consoleSize); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("size console: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("seal console: %w", err)
	}
	return c, nil
}

// Text returns the output.
func (c *Console) Text() string {
	b := make([]byte, consoleSize)
	n, err := c.out.ReadAt(b, 0)
	if err != nil && n == 0 {
		return ""
	}
	return strings.TrimSpace(strings.TrimRight(string(b[:n]), "\x00"))
}

// Has reports whether the output has a text. It is cheap while there is no output.
func (c *Console) Has(text string) bool {
	var first [1]byte
	_, err := c.out.ReadAt(first[:], 0)
	return err == nil && first[0] != 0 && strings.Contains(c.Text(), text)
}

// Close closes this handle; the container keeps its own.
func (c *Console) Close() error {
	_ = c.null.Close()
	return c.out.Close()
}

// Stdin is unused.
func (c *Console) Stdin() io.WriteCloser { return nil }

// Stdout is read by Text.
func (c *Console) Stdout() io.ReadCloser { return nil }

// Stderr is read by Text.
func (c *Console) Stderr() io.ReadCloser { return nil }

// Set connects a command to the console.
func (c *Console) Set(cmd *exec.Cmd) {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.null, c.out, c.out
}
