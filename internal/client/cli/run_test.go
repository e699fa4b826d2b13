package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// program is the real program, started against the server.
type program struct {
	*exec.Cmd
	t      *testing.T
	talk   bytes.Buffer // standard error
	marked string       // where note has its number
}

// note is a line of shell by which a command of a sandbox writes down its number. Sandboxes are directories
// of this machine in these tests, and their processes its processes.
func (p *program) note() string {
	return "echo $$ > " + p.marked + ".new; mv " + p.marked + ".new " + p.marked + "; "
}

// alone wants the sandbox of exec to be the only one.
func (s *server) alone(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.sandboxes); n != 1 {
		t.Errorf("%d sandboxes, want that of exec alone", n)
	}
}

func (s *server) program() *program {
	p := &program{Cmd: exec.CommandContext(s.t.Context(), "barchan", "--data-dir", s.dir), t: s.t, marked: filepath.Join(s.t.TempDir(), "pid")}
	p.Stderr = &p.talk
	return p
}

func (p *program) start(args ...string) {
	p.t.Helper()
	p.Args = append(p.Args, args...)
	if err := p.Start(); err != nil {
		p.t.Fatal(err)
	}
}

// pid is the number of the command, once it has begun.
func (p *program) pid() int {
	p.t.Helper()
	var pid int
	eventually.True(p.t, "the command begins", func() bool {
		b, err := os.ReadFile(p.marked)
		if err == nil {
			pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return err == nil
	})
	return pid
}

// ended waits for the program and for the command, which the program waits for too, but on a busy machine not long enough.
func (p *program) ended(code int) {
	p.t.Helper()
	pid := p.pid()
	_ = p.Wait() // its code is checked
	if got := p.ProcessState.ExitCode(); got != code {
		p.t.Errorf("exit code %d, want %d; %s", got, code, p.talk.String())
	}
	eventually.True(p.t, "the command's end", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
}

// TestClosedPipe is `barchan run -- yes | head -1` and what is like it.
func TestClosedPipe(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	for _, c := range []struct{ name, stream string }{
		{"exec " + id1, "stdout"},
		{"exec " + id1, "stderr"},
		{"run", "stdout"},
	} {
		p := s.program()
		line := p.note() + "exec yes"
		var out io.ReadCloser
		var err error
		if c.stream == "stderr" {
			p.Stderr = nil
			out, err = p.StderrPipe()
			line += " >&2"
		} else {
			out, err = p.StdoutPipe()
		}
		if err != nil {
			t.Fatal(err)
		}
		p.start(append(strings.Fields(c.name), "--", "sh", "-c", line)...)
		if _, err := io.ReadFull(out, make([]byte, 2)); err != nil {
			t.Fatal(err)
		}
		_ = out.Close()
		p.ended(141)
		if p.talk.Len() != 0 {
			t.Errorf("%s printed %q", c.name, p.talk.String())
		}
	}
	s.alone(t)
}

// TestSignals ends commands by the signals that shells, supervisors and terminals send.
func TestSignals(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	for sig, line := range map[syscall.Signal]string{
		syscall.SIGINT:  "exec sleep 1000",
		syscall.SIGTERM: "sleep 1000; echo", // a child of its own
		syscall.SIGHUP:  "trap '' TERM; while :; do sleep 1; done",
	} {
		if signal.Ignored(sig) { // the tests run under nohup, whose children ignore SIGHUP too
			continue
		}
		for _, verb := range []string{"run", "exec " + id1} {
			p := s.program()
			p.start(append(strings.Fields(verb), "--", "sh", "-c", p.note()+line)...)
			p.pid()
			if err := p.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			p.ended(128 + int(sig))
		}
	}
	s.alone(t)
}

// TestFailedWrite is a full disk behind the output of commands.
func TestFailedWrite(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	for _, args := range []string{"ls", "ls --json", "show " + id1, "env", "version", "help", "exec " + id1 + " -- echo x"} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		p := s.program()
		p.Stdout = full
		p.start(strings.Fields(args)...)
		_, _ = p.Wait(), full.Close()
		if code := p.ProcessState.ExitCode(); code != 1 || p.talk.String() != "barchan: write standard output: no space left on device\n" {
			t.Errorf("%s: exit code %d, %q", args, code, p.talk.String())
		}
	}
}

// TestNotStarted has the exit codes of programs that are not there, or cannot be executed.
func TestNotStarted(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/data", []byte("x"), 0o600), os.WriteFile(dir+"/binary", []byte{0, 1, 2}, 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"run -e PATH=" + dir, "exec -e PATH=" + dir + " " + id1} {
		for command, want := range map[string]struct {
			code int
			text string
		}{
			"nonesuch":      {127, `barchan: exec: "nonesuch": executable file not found in $PATH`},
			"/none/such":    {127, "/none/such: no such file or directory"},
			dir + "/data":   {126, "permission denied"},
			dir:             {126, "permission denied"},
			dir + "/binary": {126, "exec format error"},
			"data":          {126, "permission denied"},
		} {
			args := append(strings.Fields(verb), "--", command)
			s.run("", args...).want(t, want.code, "", want.text)
		}
	}
	s.run("", "exec", "-w", "/none/such", id1, "--", "true").want(t, 1, "", "cwd '/none/such' does not exist")
}

// TestLost has a command lose its connection in every way, and distinguishes them.
func TestLost(t *testing.T) {
	for name, c := range map[string]struct {
		befall func(s *server)
		want   string
	}{
		"killed":  {func(s *server) { delete(s.sandboxes, id1) }, "sandbox " + id1 + " ended while it was in use"},
		"timeout": {func(s *server) { delete(s.sandboxes, id1) }, "sandbox " + id1 + " ended at its timeout; set a longer one with --timeout"},
		"paused":  {func(s *server) { s.sandboxes[id1].State = "paused" }, "was paused while it was in use; `barchan resume " + id1 + "`"},
		"cut":     {func(*server) {}, "the connection to sandbox " + id1 + " broke off ("},
		"server":  {func(s *server) { _ = s.front.Listener.Close() }, "the server at http://"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, startAgent(t))
			s.add(id1, "running", nil)
			if name == "timeout" {
				s.mu.Lock()
				s.sandboxes[id1].EndAt = time.Now()
				s.mu.Unlock()
			}
			p := s.program()
			p.start("exec", id1, "--", "sh", "-c", p.note()+"exec sleep 1000")
			pid := p.pid()
			defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
			s.mu.Lock()
			c.befall(s)
			s.mu.Unlock()
			s.front.CloseClientConnections()
			_ = p.Wait() // its code is checked
			if code := p.ProcessState.ExitCode(); code != 1 || !strings.Contains(p.talk.String(), c.want) {
				t.Errorf("exit code %d, %s; want 1, %s", code, fmt.Sprint(&p.talk), c.want)
			}
		})
	}
}

// TestDetached starts a command that continues alone.
func TestDetached(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	r := s.run("", "exec", "-d", id1, "--", "sleep", "1000")
	pid, err := strconv.Atoi(strings.TrimSpace(r.stdout))
	if err != nil || r.code != 0 {
		t.Fatalf("exit code %d, %q %q, want a process ID", r.code, r.stdout, r.stderr)
	}
	if got := s.run("", "exec", id1, "--", "ps", "-o", "args=", "-p", strconv.Itoa(pid)); got.stdout != "sleep 1000\n" {
		t.Errorf("%d: %q, %q", pid, got.stdout, got.stderr)
	}
	s.run("", "exec", id1, "--", "kill", strconv.Itoa(pid)).want(t, 0, "", "")
	s.run("", "exec", "-d", "-i", id1, "--", "cat").want(t, 2, "", "not with --no-stdin or --detach")
	s.run("", "exec", "-d", id1, "--", "nonesuch").want(t, 127, "", "")
}

// TestNoInput keeps a pipe from the command.
func TestNoInput(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	for flag, want := range map[string]string{"-n": "", "-i": "text"} {
		p := s.program()
		p.Stdin = strings.NewReader("text") // through a pipe
		p.Args = append(p.Args, "exec", flag, id1, "--", "cat")
		if out, err := p.Output(); string(out) != want || err != nil {
			t.Errorf("%s: %q, %v", flag, out, err)
		}
	}
}

// TestUsersByNumber needs no entry in the sandbox's accounts.
func TestUsersByNumber(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the agent must be root to run as others")
	}
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	for user, want := range map[string]string{"0": "0 0", "54321": "54321 0", "54321:12345": "54321 12345", "root:12345": "0 12345", "0:daemon": "0 1"} {
		s.run("", "exec", "-u", user, "-w", "/", id1, "--", "sh", "-c", "echo $(id -u) $(id -g)").want(t, 0, want+"\n", "")
	}
	s.run("", "exec", "-u", "0:nonesuch", id1, "--", "true").want(t, 1, "", "invalid username: '0:nonesuch'")
	file := t.TempDir() + "/f"
	if err := os.Chmod(filepath.Dir(file), 0o777); err != nil {
		t.Fatal(err)
	}
	s.run("", "cp", "-u", "54321:12345", "/etc/hostname", id1+":"+file).want(t, 0, "", "")
	if st, err := os.Stat(file); err != nil || st.Sys().(*syscall.Stat_t).Uid != 54321 || st.Sys().(*syscall.Stat_t).Gid != 12345 {
		t.Errorf("%+v, %v", st, err)
	}
}

// TestNetworkOfRun has run set what a sandbox may reach, and what may reach it.
func TestNetworkOfRun(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.run("", "run", "--private", "--allow", "example.com", "--allow", "10.1.0.0/16", "--", "true").want(t, 0, "", "")
	got := s.created[0].Network
	if got == nil || got.AllowPublicTraffic == nil || *got.AllowPublicTraffic ||
		!slices.Equal(got.AllowOut, []string{"example.com", "10.1.0.0/16"}) || !slices.Equal(got.DenyOut, []string{"0.0.0.0/0"}) {
		t.Errorf("%+v", got)
	}
	s.run("", "run", "--", "true").want(t, 0, "", "")
	if got := s.created[1].Network; got != nil {
		t.Errorf("%+v, want the template's", got)
	}
}

// TestManyInputs runs each of a thousand inputs once, 50 at a time, and leaves no sandbox.
func TestManyInputs(t *testing.T) {
	s := newServer(t, startAgent(t))
	var in, want strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&in, "%d\n", i)
		fmt.Fprintf(&want, "%d\n", i)
	}
	r := s.run(in.String(), "run", "--parallel", "50", "--", "echo", "{}")
	r.want(t, 0, "", "1000 succeeded, 0 failed, 0 did not run to their end")
	got, all := strings.Fields(r.stdout), strings.Fields(want.String())
	slices.Sort(got)
	slices.Sort(all)
	if !slices.Equal(got, all) || len(s.created) != 1000 || len(s.sandboxes) != 0 {
		t.Errorf("%d outputs, %d sandboxes, %d left", len(got), len(s.created), len(s.sandboxes))
	}
}

// TestLostResponse loses the response to a create, after which the server has the sandbox. It is the one that runs and ends.
func TestLostResponse(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.loseCreated = 1
	s.run("", "run", "--", "echo", "out").want(t, 0, "out\n", "")
	s.loseCreated = 2
	s.run("1\n2\n", "run", "--parallel", "2", "--json", "--", "echo", "{}").want(t, 0, "", "2 succeeded, 0 failed, 0 did not run to their end")
	s.loseCreated, s.starting = 1, 1
	s.run("", "run", "--", "echo", "out").want(t, 0, "out\n", "")
	if len(s.created) != 4 || len(s.sandboxes) != 0 {
		t.Errorf("%d sandboxes for four commands, and %d are left", len(s.created), len(s.sandboxes))
	}
}

// TestHostileNames has a guest and a tenant name things so that they would command the operator's terminal.
func TestHostileNames(t *testing.T) {
	const evil = "a\x1b[2J\x1b]0;x\x07\r\nrunning\u202e\u009b1m"
	s := newServer(t, startAgent(t))
	s.add(id1, "running", map[string]string{evil: evil})
	s.snapshots = []client.Snapshot{{SnapshotID: id2, Names: []string{evil}, TemplateID: evil}}
	for _, args := range [][]string{
		{"ls"},
		{"show", id1},
		{"snapshot", "ls"},
		{"snapshot", "show", id2},
		{"cp", id1 + ":/tmp/" + evil, "/tmp"},
		{"exec", id1, "--", evil},
		{"exec", "-u", evil, id1, "--", "true"},
		{"kill", evil},
	} {
		r := s.run("", args...)
		for _, text := range []string{r.stdout, r.stderr} {
			if i := strings.IndexFunc(text, func(c rune) bool { return c != '\n' && !unicode.IsPrint(c) }); i >= 0 {
				t.Errorf("%v: %q at %d", args, text, i)
			}
		}
		if !strings.Contains(r.stdout+r.stderr, `\x1b[2J`) {
			t.Errorf("%v: %q %q lacks the name", args, r.stdout, r.stderr)
		}
		if r.code == 0 && strings.Contains(r.stdout, "\nrunning") {
			t.Errorf("%v: %q has a line of the tenant's", args, r.stdout)
		}
	}
	s.run("", "exec", id1, "--", "printf", evil).want(t, 0, evil, "")
	s.run("", "ls", "--json").want(t, 0, `\u001b[2J`, "")
}
