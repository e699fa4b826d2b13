package agent_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// reconfigure changes the configuration of an agent that runs, as a node does before a restore.
func (a *testAgent) reconfigure(change func(*envd.Config)) {
	a.t.Helper()
	file := filepath.Join(a.dir, "config.json")
	cfg, err := envd.ReadConfig(file)
	noError(a.t, err)
	change(cfg)
	noError(a.t, envd.WriteConfig(file, cfg))
}

func (a *testAgent) root(path string) string { return filepath.Join(a.dir, "root", path) }

func (a *testAgent) read(path string) string {
	a.t.Helper()
	b, err := os.ReadFile(a.root(path))
	noError(a.t, err)
	return string(b)
}

func TestRestoredTakesOnTheConfiguration(t *testing.T) {
	a := start(t, envd.Config{
		SandboxID: "first", TemplateID: "tpl", AccessToken: "old", Env: map[string]string{"KEPT": "1", "GONE": "1"},
		SystemFiles: map[string]string{"/etc/hosts": "never at a start"},
	})
	ctx, now := t.Context(), time.Now()
	noError(t, a.client("root", "old").Init(ctx, envd.InitRequest{EnvVars: map[string]string{"MERGED": "1"}, Timestamp: &now}))
	noError(t, os.MkdirAll(a.root("/etc"), 0o755))
	noError(t, os.Symlink("/elsewhere/resolv.conf", a.root("/etc/resolv.conf")))
	noError(t, os.WriteFile(a.root("/etc/machine-id"), []byte("0123456789abcdef0123456789abcdef\n"), 0o444))
	if _, err := os.Stat(a.root("/etc/hosts")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("system files were written at the start: %v", err)
	}

	a.reconfigure(func(c *envd.Config) {
		c.SandboxID, c.AccessToken, c.Env = "second", "new", map[string]string{"KEPT": "2", "ADDED": "2"}
		c.SystemFiles = map[string]string{"/etc/hosts": "10.0.0.2\tsecond\n", "/etc/resolv.conf": "nameserver 10.0.0.1\n", "/etc/hostname": "second\n"}
	})
	noError(t, a.client("", "").Restored(ctx, time.Now())) // it has no token yet, so it needs none
	_, err := a.client("root", "old").Envs(ctx)
	wantStatus(t, err, 401, "")
	c := a.client("root", "new")
	envs, err := c.Envs(ctx)
	noError(t, err)
	want := map[string]string{"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "second", "E2B_TEMPLATE_ID": "tpl", "KEPT": "2", "ADDED": "2"}
	for _, name := range []string{"E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID", "KEPT", "ADDED", "GONE", "MERGED"} {
		if envs[name] != want[name] {
			t.Errorf("%s is %q, want %q", name, envs[name], want[name])
		}
	}
	for path, text := range map[string]string{"/etc/hosts": "10.0.0.2\tsecond\n", "/etc/resolv.conf": "nameserver 10.0.0.1\n", "/etc/hostname": "second\n"} {
		if got := a.read(path); got != text {
			t.Errorf("%s has %q", path, got)
		}
	}
	id := a.read("/etc/machine-id")
	if !regexp.MustCompile(`^[0-9a-f]{32}\n$`).MatchString(id) || strings.HasPrefix(id, "0123") {
		t.Errorf("machine ID %q", id)
	}
	entries, err := os.ReadDir(a.root("/etc"))
	if err != nil || len(entries) != 4 {
		t.Errorf("left in /etc: %v, %v", entries, err)
	}

	// The same sandbox again stays the same machine, and /init orders by time again.
	noError(t, c.Restored(ctx, time.Now()))
	if again := a.read("/etc/machine-id"); again != id {
		t.Errorf("machine ID %q became %q", id, again)
	}
	earlier := now.Add(-time.Hour)
	noError(t, c.Init(ctx, envd.InitRequest{EnvVars: map[string]string{"LATE": "1"}, Timestamp: &earlier}))
	if envs, err := c.Envs(ctx); err != nil || envs["LATE"] != "1" {
		t.Errorf("envs %v, %v", envs, err)
	}
}

// An agent that was restored may be older than the node; one that is started may not.
func TestRestoredKnowsLessThanTheNode(t *testing.T) {
	a := start(t, envd.Config{SandboxID: "first"})
	file := filepath.Join(a.dir, "config.json")
	b, err := os.ReadFile(file)
	noError(t, err)
	newer := strings.Replace(string(b), `"first"`, `"second","colour":"red"`, 1)
	noError(t, os.WriteFile(file, []byte(newer), 0o600))
	noError(t, a.client("").Restored(t.Context(), time.Now()))
	if envs, err := a.client("").Envs(t.Context()); err != nil || envs["E2B_SANDBOX_ID"] != "second" {
		t.Errorf("%v, %v", envs, err)
	}
	noError(t, os.WriteFile(file, []byte(`{"port":99999}`), 0o600))
	wantStatus(t, a.client("").Restored(t.Context(), time.Now()), 500, "port")
	if envs, err := a.client("").Envs(t.Context()); err != nil || envs["E2B_SANDBOX_ID"] != "second" {
		t.Errorf("after a configuration that cannot be right: %v, %v", envs, err)
	}
}

// Connections of the checkpoint end with an error; processes continue, and their exit is reported.
func TestRestoredEndsStreams(t *testing.T) {
	a := start(t, envd.Config{})
	c, ctx := a.client("root"), t.Context()
	dir := t.TempDir()
	process, err := c.Process().Start(ctx, connect.NewRequest(sh("read line; echo got $line; exit 7")))
	noError(t, err)
	defer func() { _ = process.Close() }()
	if !process.Receive() {
		t.Fatal(process.Err())
	}
	pid := process.Msg().GetEvent().GetStart().GetPid()
	watch, err := c.Filesystem().WatchDir(ctx, connect.NewRequest(&filesystempb.WatchDirRequest{Path: dir}))
	noError(t, err)
	defer func() { _ = watch.Close() }()
	if !watch.Receive() {
		t.Fatal(watch.Err())
	}
	var logs error
	var following sync.WaitGroup
	followed := make(chan struct{})
	following.Go(func() {
		first := sync.OnceFunc(func() { close(followed) })
		defer first()
		logs = c.Logs(ctx, "", true, func(envd.LogLine) error { first(); return nil })
	})
	<-followed // the agent's own first line

	at := time.Now()
	noError(t, c.Restored(ctx, at))
	for name, s := range map[string]eventStream{"process": process, "watch": watch} {
		for s.Receive() {
			continue
		}
		wantCode(t, s.Err(), connect.CodeUnavailable, envd.RestoredText)
		if s.Err() == nil {
			t.Errorf("%s: no error", name)
		}
	}
	following.Wait()
	wantStatus(t, logs, 503, envd.RestoredText)

	selector := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
	again, err := c.Process().Connect(ctx, connect.NewRequest(&processpb.ConnectRequest{Process: selector}))
	noError(t, err)
	defer func() { _ = again.Close() }()
	if !again.Receive() {
		t.Fatal(again.Err())
	}
	noError(t, c.Restored(ctx, at)) // a repeated one ends nothing
	_, err = c.Process().SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{
		Process: selector, Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte("this\n")}},
	}))
	noError(t, err)
	var out string
	var end *processpb.ProcessEvent_EndEvent
	for again.Receive() {
		out += string(again.Msg().GetEvent().GetData().GetStdout())
		end = again.Msg().GetEvent().GetEnd()
	}
	if again.Err() != nil || out != "got this\n" || end.GetExitCode() != 7 {
		t.Errorf("after that: %q, %v, %v", out, end, again.Err())
	}
	late, err := c.Process().Connect(ctx, connect.NewRequest(&processpb.ConnectRequest{Process: selector}))
	noError(t, err)
	if r := take(t, late, func() *processpb.ProcessEvent { return late.Msg().GetEvent() }, nil); r.end.GetExitCode() != 7 {
		t.Errorf("a late client: %+v", r)
	}
}

func TestRun(t *testing.T) {
	a := start(t, envd.Config{Env: map[string]string{"A": "1"}})
	c := a.client("")
	exit, tail, err := c.Run(t.Context(), []string{"/bin/sh", "-c", "echo $A$B >&2; pwd; exit 3"}, envd.RunOptions{Env: map[string]string{"B": "2"}, Dir: "/usr"})
	if err != nil || exit != 3 || (string(tail) != "12\n/usr\n" && string(tail) != "/usr\n12\n") {
		t.Errorf("%d, %q, %v", exit, tail, err)
	}
	exit, tail, err = c.Run(t.Context(), []string{"/bin/sh", "-c", "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done"}, envd.RunOptions{})
	if err != nil || exit != 0 || len(tail) != 4<<10 || !strings.HasSuffix(string(tail), "\n2999\n") {
		t.Errorf("%d, %d bytes, %v", exit, len(tail), err)
	}
	if exit, _, err := c.Run(t.Context(), []string{"/bin/sh", "-c", "kill -9 $$"}, envd.RunOptions{}); err != nil || exit != -1 {
		t.Errorf("killed: %d, %v", exit, err)
	}
	if _, _, err := c.Run(t.Context(), []string{"/none"}, envd.RunOptions{}); !envd.IsCode(err, connect.CodeInvalidArgument) {
		t.Errorf("no such program: %v", err)
	}
	if _, _, err := c.Run(t.Context(), nil, envd.RunOptions{}); !envd.IsCode(err, connect.CodeInvalidArgument) {
		t.Errorf("no program: %v", err)
	}
}

func TestRunGivenUp(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("")
	late := errors.New("took too long")
	ctx, cancel := context.WithCancelCause(t.Context())
	file := filepath.Join(a.dir, "pid")
	var tail []byte
	var err error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, tail, err = c.Run(ctx, []string{"/bin/sh", "-c", "echo begun; mkdir " + file + "; sleep 1000"}, envd.RunOptions{})
	}()
	eventually.True(t, "program", func() bool { _, err := os.Stat(file); return err == nil })
	cancel(late)
	<-ended
	if !errors.Is(err, late) || string(tail) != "begun\n" {
		t.Errorf("given up: %q, %v", tail, err)
	}
	list, err := c.Process().List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 0 {
		t.Errorf("left: %v, %v", list.Msg.GetProcesses(), err)
	}
	cancelled, stop := context.WithCancel(t.Context())
	stop()
	if _, _, err := c.Run(cancelled, []string{"/bin/sleep", "1000"}, envd.RunOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("given up before: %v", err)
	}
}
