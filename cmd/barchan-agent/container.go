package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// program is the name that the agent has in a volume.
	program = "barchan-agent"
	// detachTimeout bounds the start of a detached agent.
	detachTimeout = 20 * time.Second
)

// install copies this program into a directory, from which every user may run it. The copy is complete
// or absent.
func install(dir string) (err error) {
	own, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	from, err := os.Open(own)
	if err != nil {
		return fmt.Errorf("install: %w", err)
	}
	defer func() { _ = from.Close() }()
	to, err := os.CreateTemp(dir, "."+program+"-*")
	if err != nil {
		return fmt.Errorf("install: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(to.Name())
		}
	}()
	_, err = io.Copy(to, from)
	if err = errors.Join(err, to.Chmod(0o755), to.Close()); err != nil {
		return fmt.Errorf("install: %w", err)
	}
	if err := os.Rename(to.Name(), filepath.Join(dir, program)); err != nil {
		return fmt.Errorf("install: %w", err)
	}
	return nil
}

// detach starts this program again as an agent in a session of its own, and returns once that answers.
// It leaves no file open that the caller waits for.
func detach(ctx context.Context, config string) error {
	cfg, err := envd.ParseConfig(config)
	if err != nil {
		return err
	}
	own, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if answers(ctx, cmp.Or(cfg.Port, envd.Port)) {
		return fmt.Errorf("port %d is in use by another agent", cmp.Or(cfg.Port, envd.Port))
	}
	ctx, cancel := context.WithTimeout(ctx, detachTimeout)
	defer cancel()
	var output bytes.Buffer
	child := exec.Command(own, "-beside", config) //nolint:noctx // it outlives this process
	child.Stderr, child.SysProcAttr = &output, &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- child.Wait() }()
	port := cmp.Or(cfg.Port, envd.Port)
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		select {
		case err := <-exited:
			return fmt.Errorf("the agent ended at its start: %w\n%s", err, output.String())
		case <-ctx.Done():
			_ = child.Process.Kill()
			<-exited //nolint:errcheck // it was killed
			return fmt.Errorf("the agent does not answer on port %d: %w\n%s", port, ctx.Err(), output.String())
		case <-time.After(pause):
		}
		if answers(ctx, port) {
			return nil
		}
	}
}

// answers reports whether an agent serves the port.
func answers(ctx context.Context, port int) bool {
	for _, host := range []string{"127.0.0.1", "::1"} {
		address := "http://" + net.JoinHostPort(host, strconv.Itoa(port)) + envd.PathHealth
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
		if err != nil {
			return false
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			continue
		}
		_ = resp.Body.Close()
		if resp.Header.Get(envd.HeaderVersion) == envd.Version {
			return true
		}
	}
	return false
}

// become replaces this process by a program, which it finds as a shell does.
func become(argv []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return syscall.Exec(path, argv, os.Environ()) //nolint:gosec // the template's own command
}
