package agent_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// result is all that came of a process.
type result struct {
	pid                 uint32
	stdout, stderr, pty string
	end                 *processpb.ProcessEvent_EndEvent
	keepalives          int
	err                 error
}

type eventStream interface {
	Receive() bool
	Err() error
	Close() error
}

// take reads a stream to its end, calling each (if not nil) at every event.
func take(t *testing.T, s eventStream, event func() *processpb.ProcessEvent, each func(*result)) result {
	t.Helper()
	defer func() { _ = s.Close() }()
	var r result
	for n := 0; s.Receive(); n++ {
		ev := event()
		if r.end != nil {
			t.Errorf("event after the end: %v", ev)
		}
		if (n == 0) != (ev.GetStart() != nil) {
			t.Errorf("event %d is %v: start must be the first, and only it", n, ev)
		}
		switch e := ev.GetEvent().(type) {
		case *processpb.ProcessEvent_Start:
			r.pid = e.Start.GetPid()
		case *processpb.ProcessEvent_Data:
			r.stdout += string(e.Data.GetStdout())
			r.stderr += string(e.Data.GetStderr())
			r.pty += string(e.Data.GetPty())
		case *processpb.ProcessEvent_End:
			r.end = e.End
		case *processpb.ProcessEvent_Keepalive:
			r.keepalives++
		}
		if each != nil {
			each(&r)
		}
	}
	r.err = s.Err()
	return r
}

func runWith(ctx context.Context, t *testing.T, c *envd.Client, req *processpb.StartRequest, each func(*result), header ...string) result {
	t.Helper()
	r := connect.NewRequest(req)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header().Set(header[i], header[i+1])
	}
	s, err := c.Process().Start(ctx, r)
	if err != nil {
		return result{err: err}
	}
	return take(t, s, func() *processpb.ProcessEvent { return s.Msg().GetEvent() }, each)
}

func run(t *testing.T, c *envd.Client, req *processpb.StartRequest, header ...string) result {
	t.Helper()
	return runWith(t.Context(), t, c, req, nil, header...)
}

func byPID(pid uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
}

func byTag(tag string) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: tag}}
}

func attach(t *testing.T, c *envd.Client, sel *processpb.ProcessSelector) result {
	t.Helper()
	s, err := c.Process().Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: sel}))
	if err != nil {
		return result{err: err}
	}
	return take(t, s, func() *processpb.ProcessEvent { return s.Msg().GetEvent() }, nil)
}

func wantCode(t *testing.T, err error, code connect.Code, text string) {
	t.Helper()
	if !envd.IsCode(err, code) || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want %v with %q", err, code, text)
	}
}

func TestProcessOutcome(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	for name, tc := range map[string]struct {
		script, stdout, stderr, status, err string
		code                                int32
		exited                              bool
	}{
		"success":       {"echo out; echo err >&2", "out\n", "err\n", "exit status 0", "", 0, true},
		"exit code":     {"exit 42", "", "", "exit status 42", "exit status 42", 42, true},
		"killed":        {"echo a; kill -KILL $$", "a\n", "", "signal: killed", "signal: killed", -1, false},
		"terminated":    {"kill -TERM $$", "", "", "signal: terminated", "signal: terminated", -1, false},
		"no input ends": {"cat; echo b", "b\n", "", "exit status 0", "", 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			req := sh(tc.script)
			req.Stdin = new(bool)
			r := run(t, c, req)
			if r.err != nil || r.end == nil {
				t.Fatalf("end %v, error %v", r.end, r.err)
			}
			if r.stdout != tc.stdout || r.stderr != tc.stderr {
				t.Errorf("stdout %q, stderr %q", r.stdout, r.stderr)
			}
			if r.end.GetExitCode() != tc.code || r.end.GetExited() != tc.exited || r.end.GetStatus() != tc.status || r.end.GetError() != tc.err {
				t.Errorf("end %v", r.end)
			}
			if (r.end.Error == nil) != (tc.err == "") {
				t.Errorf("error is set: %v", r.end.Error != nil)
			}
		})
	}
}

// The reaper must never lose a status to a race, nor the pumps output.
func TestNothingIsLost(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 25 {
				want := fmt.Sprintf("%d-%d", w, i)
				r := run(t, c, sh("printf "+want+"; printf "+want+" >&2; exit "+strconv.Itoa(i)))
				if r.err != nil || r.stdout != want || r.stderr != want || int(r.end.GetExitCode()) != i {
					t.Errorf("%s: %+v", want, r)
				}
			}
		})
	}
	wg.Wait()
	const size = 3_000_000
	r := run(t, c, sh(fmt.Sprintf("head -c %d /dev/zero", size)))
	if r.err != nil || len(r.stdout) != size || r.end.GetExitCode() != 0 {
		t.Errorf("%d bytes of %d, end %v, error %v", len(r.stdout), size, r.end, r.err)
	}
}

func TestChildThatKeepsThePipe(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	mark := filepath.Join(a.dir, "mark")
	r := run(t, c, sh("(while [ ! -e "+mark+".go ]; do sleep 0.05; done; echo late; echo late; echo written > "+mark+") & echo early"))
	if r.err != nil || r.stdout != "early\n" || r.end.GetExitCode() != 0 {
		t.Fatalf("%+v", r)
	}
	noError(t, os.WriteFile(mark+".go", nil, 0o600))
	// It keeps running, and writing without a reader does not kill it.
	eventually.True(t, "child's mark", func() bool {
		b, err := os.ReadFile(mark)
		return err == nil && string(b) == "written\n"
	})
}

func TestTimeoutKills(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	r := run(t, c, sh("sleep 1000 & sleep 1000"), "Connect-Timeout-Ms", "200")
	wantCode(t, r.err, connect.CodeDeadlineExceeded, "")
	eventually.True(t, "end of the process", func() bool { return len(list(t, c)) == 0 })

	ctx, cancel := context.WithCancel(t.Context())
	r = runWith(ctx, t, c, sh("sleep 1000"), func(*result) { cancel() }, "Connect-Timeout-Ms", "600000")
	wantCode(t, r.err, connect.CodeCanceled, "")
	if len(list(t, c)) != 1 {
		t.Error("the process ended with its client")
	}
	kill(t, c, r.pid)
	eventually.True(t, "end of the killed process", func() bool { return len(list(t, c)) == 0 })
	ctx, cancel = context.WithCancel(t.Context())
	runWith(ctx, t, c, sh("sleep 1000"), func(*result) { cancel() }, "Connect-Timeout-Ms", "1500")
	eventually.True(t, "end of the process without subscribers", func() bool { return len(list(t, c)) == 0 })
	wantCode(t, run(t, c, sh("true"), "Connect-Timeout-Ms", "soon").err, connect.CodeInvalidArgument, "")
}

func list(t *testing.T, c *envd.Client) []*processpb.ProcessInfo {
	t.Helper()
	res, err := c.Process().List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
	noError(t, err)
	return res.Msg.GetProcesses()
}

func TestDisconnectAndConnect(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	tag := "job"
	req := sh("while [ ! -e " + a.dir + "/go ]; do sleep 0.02; done; echo done; exit 6")
	req.Tag = &tag
	ctx, cancel := context.WithCancel(t.Context())
	left := runWith(ctx, t, c, req, func(*result) { cancel() })
	procs := list(t, c)
	if len(procs) != 1 || procs[0].GetTag() != tag || procs[0].GetPid() != left.pid || procs[0].GetConfig().GetCmd() != "/bin/sh" {
		t.Fatalf("list: %v", procs)
	}
	results := make(chan result, 2)
	var wg sync.WaitGroup
	started := make(chan struct{}, 2)
	for _, sel := range []*processpb.ProcessSelector{byPID(left.pid), byTag(tag)} {
		wg.Go(func() {
			signalStarted := sync.OnceFunc(func() { started <- struct{}{} })
			defer signalStarted()
			s, err := c.Process().Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: sel}))
			if err != nil {
				t.Error(err)
				return
			}
			results <- take(t, s, func() *processpb.ProcessEvent { return s.Msg().GetEvent() }, func(*result) { signalStarted() })
		})
	}
	<-started
	<-started
	noError(t, os.WriteFile(a.dir+"/go", nil, 0o600))
	wg.Wait()
	close(results)
	for r := range results {
		if r.err != nil || r.pid != left.pid || r.stdout != "done\n" || r.end.GetExitCode() != 6 {
			t.Errorf("%+v", r)
		}
	}
}

func TestConnectAfterTheEnd(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	tag := "job"
	for _, script := range []string{"exit 5", "exit 6"} { // a tag refers to the latest
		req := sh(script)
		req.Tag = &tag
		run(t, c, req)
	}
	// The exit is kept for a while, though the process is no more.
	if r := attach(t, c, byTag(tag)); r.err != nil || r.end.GetExitCode() != 6 {
		t.Errorf("after the end: %+v", r)
	}
	if n := len(list(t, c)); n != 0 {
		t.Errorf("%d processes listed", n)
	}
	wantCode(t, attach(t, c, byPID(4_000_000)).err, connect.CodeNotFound, "4000000")
	wantCode(t, attach(t, c, &processpb.ProcessSelector{}).err, connect.CodeInvalidArgument, "pid or a tag")
}

func TestSignals(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	send := func(pid uint32, sig processpb.Signal) error {
		_, err := c.Process().SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(pid), Signal: sig}))
		return err
	}
	sent := false // the shell may write to stderr afterwards
	r := runWith(t.Context(), t, c, sh("trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.02; done"), func(r *result) {
		if r.stdout == "ready\n" && !sent {
			sent = true
			if err := send(r.pid, processpb.Signal_SIGNAL_SIGTERM); err != nil {
				t.Error(err)
			}
		}
	})
	if r.stdout != "ready\ncaught\n" || r.end.GetExitCode() != 9 {
		t.Errorf("TERM: %+v", r)
	}
	// KILL reaches what the process started, too.
	sent = false
	r = runWith(t.Context(), t, c, sh("sleep 1000 & echo $!; wait"), func(r *result) {
		if r.stdout != "" && !sent {
			sent = true
			if err := send(r.pid, processpb.Signal_SIGNAL_SIGKILL); err != nil {
				t.Error(err)
			}
		}
	})
	if r.end.GetError() != "signal: killed" {
		t.Errorf("KILL: %+v", r)
	}
	eventually.True(t, "end of the grandchild", func() bool {
		_, err := os.Stat("/proc/" + strings.TrimSpace(r.stdout))
		return os.IsNotExist(err)
	})
	wantCode(t, send(r.pid, processpb.Signal_SIGNAL_SIGKILL), connect.CodeNotFound, "not found")
	wantCode(t, send(4_000_000, processpb.Signal_SIGNAL_SIGKILL), connect.CodeNotFound, "not found")
}

func TestInput(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	input := func(pid uint32, text string) error {
		in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(text)}}
		_, err := c.Process().SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPID(pid), Input: in}))
		return err
	}
	closeStdin := func(pid uint32) error {
		_, err := c.Process().CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(pid)}))
		return err
	}
	big := strings.Repeat("0123456789", 30_000) // more than a pipe holds
	r := runWith(t.Context(), t, c, sh("cat; sleep 1000"), func(r *result) {
		if r.stdout == "" && r.end == nil {
			if err := input(r.pid, big); err != nil {
				t.Error(err)
			}
			stream := c.Process().StreamInput(t.Context())
			for _, m := range []*processpb.StreamInputRequest{
				{Event: &processpb.StreamInputRequest_Start{Start: &processpb.StreamInputRequest_StartEvent{Process: byPID(r.pid)}}},
				{Event: &processpb.StreamInputRequest_Keepalive{Keepalive: &processpb.StreamInputRequest_KeepAlive{}}},
				{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{
					Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte("tail")}},
				}}},
			} {
				if err := stream.Send(m); err != nil {
					t.Error(err)
				}
			}
			if _, err := stream.CloseAndReceive(); err != nil {
				t.Error(err)
			}
			if err := closeStdin(r.pid); err != nil {
				t.Error(err)
			}
			wantCode(t, input(r.pid, "x"), connect.CodeFailedPrecondition, "input")
		}
		if r.stdout == big+"tail" && r.end == nil {
			kill(t, c, r.pid)
		}
	})
	if r.err != nil || r.stdout != big+"tail" {
		t.Errorf("%d bytes back, error %v", len(r.stdout), r.err)
	}
	none := sh("echo ready; sleep 1000")
	none.Stdin = new(bool)
	run := runWith(t.Context(), t, c, none, func(r *result) {
		if r.stdout != "" && r.end == nil {
			wantCode(t, input(r.pid, "x"), connect.CodeFailedPrecondition, "input")
			wantCode(t, closeStdin(r.pid), connect.CodeFailedPrecondition, "input")
			kill(t, c, r.pid)
		}
	})
	wantCode(t, input(run.pid, "x"), connect.CodeNotFound, "not found")
}

func kill(t *testing.T, c *envd.Client, pid uint32) {
	t.Helper()
	_, err := c.Process().SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(pid), Signal: processpb.Signal_SIGNAL_SIGKILL}))
	if err != nil {
		t.Error(err)
	}
}

// A writer that waits for a process that does not read ends with its client.
func TestUnreadInput(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	runWith(t.Context(), t, c, sh("echo ready; sleep 1000"), func(r *result) {
		if r.stdout == "" || r.end != nil {
			return
		}
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: make([]byte, 1<<20)}}
			_, err := c.Process().SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byPID(r.pid), Input: in}))
			wantCode(t, err, connect.CodeDeadlineExceeded, "")
			cancel()
		}
		kill(t, c, r.pid)
	})
}

func TestTerminal(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	req := &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-i"}, Envs: map[string]string{"PS1": "", "ENV": ""}},
		Pty:     &processpb.PTY{Size: &processpb.PTY_Size{Cols: 90, Rows: 20}},
	}
	write := func(pid uint32, in *processpb.ProcessInput) error {
		_, err := c.Process().SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPID(pid), Input: in}))
		return err
	}
	send := func(pid uint32, text string) {
		if err := write(pid, &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte(text)}}); err != nil {
			t.Error(err)
		}
	}
	step := 0
	r := runWith(t.Context(), t, c, req, func(r *result) {
		switch {
		case step == 0:
			step++
			send(r.pid, "stty size; tty\n")
		case step == 1 && strings.Contains(r.pty, "20 90") && strings.Contains(r.pty, "/dev/pts/"):
			step++
			_, err := c.Process().Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{
				Process: byPID(r.pid), Pty: &processpb.PTY{Size: &processpb.PTY_Size{Cols: 101, Rows: 31}},
			}))
			if err != nil {
				t.Error(err)
			}
			wantCode(t, write(r.pid, &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte("x")}}), connect.CodeFailedPrecondition, "pty")
			_, err = c.Process().CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(r.pid)}))
			wantCode(t, err, connect.CodeFailedPrecondition, "Ctrl-D")
			send(r.pid, "stty size; exit 4\n")
		}
	})
	if r.err != nil || step != 2 || !strings.Contains(r.pty, "31 101") || r.end.GetExitCode() != 4 {
		t.Errorf("step %d, %+v", step, r)
	}
}

func TestTerminalWithABackgroundChild(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	req := sh("trap '' HUP; sleep 1000 & echo child $!; exit 3")
	req.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 80, Rows: 24}}
	r := run(t, c, req)
	if r.err != nil || r.end.GetExitCode() != 3 {
		t.Fatalf("%+v", r)
	}
	var pid uint32
	if _, err := fmt.Sscanf(r.pty, "child %d", &pid); err != nil {
		t.Fatalf("%q: %v", r.pty, err)
	}
	run(t, c, sh(fmt.Sprintf("kill -9 %d", pid)))
}

func TestUserAndEnvironment(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{SandboxID: "sbx1", TemplateID: "tpl1", Env: map[string]string{"A": "config", "B": "config"}})
	noError(t, a.client("root").Init(t.Context(), envd.InitRequest{EnvVars: map[string]string{"B": "init", "C": "init"}}))
	const scored = "i=0; until [ $(cat /proc/$$/oom_score_adj) = 100 ] || [ $i = 6000 ]; do i=$((i+1)); sleep 0.01; done; " // it is set while the program runs
	req := sh(scored + "id -u; id -g; id -G; echo $HOME $USER $LOGNAME; echo $A $B $C $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID; cat /proc/self/oom_score_adj; echo ok > /dev/stdout; echo ${TESTVAR-unset}")
	req.Process.Envs = map[string]string{"C": "request"}
	cwd := "/"
	req.Process.Cwd = &cwd
	t.Setenv("TESTVAR", "leaked")
	r := run(t, a.client("nobody"), req)
	want := "65534\n65534\n65534\n/nonexistent nobody nobody\nconfig init request true sbx1 tpl1\n100\nok\nunset\n"
	if r.err != nil || r.stdout != want {
		t.Errorf("stdout %q, want %q (stderr %q, error %v)", r.stdout, want, r.stderr, r.err)
	}
	wantCode(t, run(t, a.client("ghost"), sh("true")).err, connect.CodeUnauthenticated, "invalid username: 'ghost'")
}

func TestBadRequests(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	file := filepath.Join(a.dir, "file")
	noError(t, os.WriteFile(file, nil, 0o600))
	in := func(cwd string) *processpb.StartRequest {
		r := sh("pwd")
		r.Process.Cwd = &cwd
		return r
	}
	for name, tc := range map[string]struct {
		req  *processpb.StartRequest
		code connect.Code
		text string
	}{
		"no cwd":       {in("/no/such"), connect.CodeInvalidArgument, "cwd '/no/such' does not exist"},
		"cwd file":     {in(file), connect.CodeInvalidArgument, "is not a directory"},
		"cwd tilde":    {in("~other"), connect.CodeInvalidArgument, "~"},
		"no program":   {&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "no-such-program"}}, connect.CodeInvalidArgument, "executable file not found in $PATH"},
		"no path":      {&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/no/such"}}, connect.CodeInvalidArgument, "no such file"},
		"a directory":  {&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/tmp"}}, connect.CodeInvalidArgument, "permission denied"},
		"nothing":      {&processpb.StartRequest{}, connect.CodeInvalidArgument, "empty"},
		"env name":     {&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Envs: map[string]string{"A=B": "c"}}}, connect.CodeInvalidArgument, "envs"},
		"env zero":     {&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Envs: map[string]string{"A": "b\x00"}}}, connect.CodeInvalidArgument, "envs"},
		"argument nul": {&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "true", Args: []string{"\x00"}}}, connect.CodeInvalidArgument, "invalid argument"},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, run(t, c, tc.req).err, tc.code, tc.text) })
	}
	for cwd, want := range map[string]string{"/tmp": "/tmp", "/tmp/../usr": "/usr", "": "/root", "~": "/root", ".": "/root"} {
		if r := run(t, c, in(cwd)); os.Geteuid() == 0 && r.stdout != want+"\n" {
			t.Errorf("cwd %q is %q, error %v", cwd, r.stdout, r.err)
		}
	}
	// A program by name alone is looked up in the request's own PATH.
	req := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "sh", Args: []string{"-c", "echo $PATH"}, Envs: map[string]string{"PATH": "/nowhere:/bin"}}}
	if r := run(t, c, req); r.stdout != "/nowhere:/bin\n" {
		t.Errorf("own PATH: %+v", r)
	}
}

func TestKeepalive(t *testing.T) {
	c := start(t, envd.Config{}).client("root")
	r := runWith(t.Context(), t, c, sh("sleep 1000"), func(r *result) {
		if r.keepalives == 2 && r.end == nil {
			kill(t, c, r.pid)
		}
	}, envd.HeaderKeepalive, "1")
	if r.err != nil || r.keepalives < 2 {
		t.Errorf("%d signs of life, error %v", r.keepalives, r.err)
	}
}

func TestOrphansAreReaped(t *testing.T) {
	a := start(t, envd.Config{})
	r := run(t, a.client("root"), sh("for i in 1 2 3 4 5; do (sleep 0.05 & ) ; done"))
	if r.err != nil || r.end.GetExitCode() != 0 {
		t.Fatalf("%+v", r)
	}
	eventually.True(t, "no children left", func() bool {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", a.cmd.Process.Pid))
		if err != nil || len(tasks) == 0 {
			t.Fatal("no list of children: ", err)
		}
		for _, f := range tasks {
			if b, err := os.ReadFile(f); err == nil && len(b) > 0 {
				return false
			}
		}
		return true
	})
}
