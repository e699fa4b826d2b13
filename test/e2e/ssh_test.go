package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// secureShell has the programs of OpenSSH use a server.
type secureShell struct {
	*server
	dir, config, id string
}

// testSSH has OpenSSH's own client use sandboxes.
func testSSH(t *testing.T, s *server) {
	dir := t.TempDir()
	w := &secureShell{server: s, dir: dir, config: filepath.Join(dir, "config"), id: s.create(s.localKey(), "base")}
	for _, name := range []string{"key", "other"} {
		if out, err := exec.CommandContext(t.Context(), "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(dir, name)).CombinedOutput(); err != nil {
			t.Fatalf("ssh-keygen: %v\n%s", err, out)
		}
	}
	w.write("config", s.data("ssh-config")+"    IdentityFile "+filepath.Join(dir, "key")+"\n    IdentitiesOnly yes\n    BatchMode yes\n")
	before := w.ssh(nil, w.host(), "true")
	fingerprint := strings.TrimSpace(s.data("ssh-key", "add", filepath.Join(dir, "key.pub")))
	if list := s.data("ssh-key", "ls"); !strings.Contains(list, fingerprint) {
		t.Errorf("the list of keys lacks %s:\n%s", fingerprint, list)
	}
	for name, test := range map[string]func(*testing.T, *secureShell){
		"exec": testSSHExec, "shell": testSSHShell, "files": testSSHFiles, "ports": testSSHPorts, "passwords": testSSHPasswords, "signals": testSSHSignals,
		"git": testSSHGit, "editor": testSSHEditor,
	} {
		t.Run(name, func(t *testing.T) {
			mine := *w
			mine.server = s.in(t)
			test(t, &mine)
		})
	}
	testSSHPaused(t, w)
	testSSHRefusals(t, w, before, fingerprint)
}

func (w *secureShell) write(name, text string) string {
	w.t.Helper()
	file := filepath.Join(w.dir, name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return file
}

func (w *secureShell) host() string { return w.id + ".barchan" }

// ran is the end of a program.
type ran struct {
	out, err string
	code     int
}

// run runs a program of OpenSSH with our configuration.
func (w *secureShell) run(stdin io.Reader, program string, args ...string) (r ran) {
	w.t.Helper()
	cmd := w.command(program, args...)
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &stderr
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		r.code = exit.ExitCode()
	} else if err != nil {
		w.t.Fatalf("%s %v: %v", program, args, err)
	}
	r.out, r.err = out.String(), stderr.String()
	return r
}

func (w *secureShell) command(program string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	w.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, append([]string{"-F", w.config}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+w.dir)
	cmd.WaitDelay = time.Second
	return cmd
}

func (w *secureShell) ssh(stdin io.Reader, args ...string) ran {
	w.t.Helper()
	return w.run(stdin, "ssh", args...)
}

// want compares the end of a program.
func (w *secureShell) want(got ran, out string, code int) {
	w.t.Helper()
	if got.out != out || got.code != code {
		w.t.Errorf("got %+v, want %q and %d\n%s", got, out, code, w.tail())
	}
}

// testSSHExec runs commands: output and errors apart, exit codes, input, variables, users.
func testSSHExec(t *testing.T, w *secureShell) {
	got := w.ssh(strings.NewReader("input"), w.host(), "cat; echo err >&2; exit 7")
	if w.want(got, "input", 7); got.err != "err\n" {
		t.Errorf("standard error: %q", got.err)
	}
	w.want(w.ssh(nil, "-o", "SetEnv=WORD=kept", w.host(), "echo $WORD $SHELL; pwd"), "kept /bin/bash\n/home/user\n", 0)
	w.want(w.ssh(nil, "root@"+w.host(), "id -u"), "0\n", 0)
	w.want(w.ssh(nil, w.host(), "kill -TERM $$"), "", 128+15)
	if got := w.ssh(nil, "nobody-such@"+w.host(), "true"); got.code != 255 || !strings.Contains(got.err, "invalid username") {
		t.Errorf("an unknown user: %+v", got)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	if got := w.ssh(bytes.NewReader(big), w.host(), "cat"); got.out != string(big) {
		t.Errorf("of %d bytes of input, %d come back", len(big), len(got.out))
	}
	if got := w.ssh(nil, "-A", w.host(), "echo ${SSH_AUTH_SOCK:-none}"); got.out != "none\n" {
		t.Errorf("with agent forwarding: %+v", got)
	}
	// A program that is left behind neither holds the session nor ends with it.
	w.want(w.ssh(nil, w.host(), "sleep 600 >/dev/null 2>&1 & echo $! >/tmp/left"), "", 0)
	w.want(w.ssh(nil, w.host(), "kill -0 $(cat /tmp/left) && echo lives"), "lives\n", 0)
}

// testSSHShell uses a login shell with a terminal, whose size changes.
func testSSHShell(t *testing.T, w *secureShell) {
	cmd := w.command("ssh", w.host())
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Cols: 100, Rows: 33})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tty.Close() }()
	var screen lockedText
	go func() { _, _ = io.Copy(&screen, tty) }()
	say := func(line, want string) {
		t.Helper()
		if _, err := io.WriteString(tty, line+"\n"); err != nil {
			t.Fatal(err)
		}
		eventually.True(t, fmt.Sprintf("%q on the screen after %q", want, line), func() bool { return strings.Contains(screen.String(), want) })
	}
	// What is typed before the shell reads may be discarded with what its terminal had.
	eventually.True(t, "a prompt", func() bool { return strings.Contains(screen.String(), "$ ") })
	say("stty size", "33 100")
	say("echo term=$TERM", "term="+os.Getenv("TERM"))
	if err := pty.Setsize(tty, &pty.Winsize{Cols: 90, Rows: 20}); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the new size", func() bool {
		_, _ = io.WriteString(tty, "stty size\n")
		return strings.Contains(screen.String(), "20 90")
	})
	say("sh -c 'echo sl\"\"eeps; exec sleep 600'", "sleeps") // by then the terminal is the child's, and so is ^C
	say("\x03echo interru''pted", "interrupted")
	_, _ = io.WriteString(tty, "exit 3\n")
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 3 {
		t.Errorf("the shell's end: %v\n%s", err, screen.String())
	}
}

// testSSHFiles moves 10 MB there and back, and manages files by SFTP.
func testSSHFiles(t *testing.T, w *secureShell) {
	content := make([]byte, 10<<20)
	_, _ = rand.Read(content)
	up, down := w.write("up", string(content)), filepath.Join(w.dir, "down")
	w.want(w.run(nil, "scp", "-q", up, w.host()+":big"), "", 0)
	w.want(w.run(nil, "scp", "-q", w.host()+":big", down), "", 0)
	if got, err := os.ReadFile(down); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes come back, %v", len(got), err)
	}
	batch := w.write("batch", "mkdir sub\nput "+up+" sub/a\nrename sub/a sub/b\nchmod 600 sub/b\nls -l sub\nrm sub/b\nrmdir sub\n")
	if got := w.run(nil, "sftp", "-q", "-b", batch, w.host()); got.code != 0 || !strings.Contains(got.out, "-rw-------") || !strings.Contains(got.out, "sub/b") {
		t.Errorf("sftp: %+v", got)
	}
	if got := w.run(nil, "scp", "-q", up, w.host()+":/etc/nope"); got.code == 0 {
		t.Errorf("a file that only root may write: %+v", got)
	}
}

// testSSHPorts forwards ports and a socket, and nothing beyond the sandbox.
func testSSHPorts(t *testing.T, w *secureShell) {
	w.want(w.ssh(nil, w.host(), `cd /tmp; echo page >index.html; nohup python3 -m http.server --bind 127.0.0.1 8080 >/dev/null 2>&1 &
nohup python3 -c 'import socket
s = socket.socket(socket.AF_UNIX); s.bind("/tmp/socket"); s.listen()
while True:
    c, _ = s.accept(); c.sendall(b"HTTP/1.0 200 OK\r\n\r\nsocket"); c.close()' >/dev/null 2>&1 &`), "", 0)
	var at [4]string
	for i := range at {
		at[i] = program.Address(t)
	}
	cmd := w.command("ssh", "-N", "-L", at[0]+":localhost:8080", "-L", at[1]+":/tmp/socket", "-L", at[2]+":169.254.169.254:80", "-D", at[3], w.host())
	var stderr lockedText
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	for address, want := range map[string]string{at[0]: "page\n", at[1]: "socket"} {
		eventually.NoError(t, "a page through "+address, func() error {
			body, err := page(t, address)
			if err == nil && body != want {
				err = fmt.Errorf("got %q", body)
			}
			return err
		})
	}
	if body, err := page(t, at[2]); err == nil {
		t.Errorf("an address beyond the sandbox: %q", body)
	}
	eventually.True(t, "the reason", func() bool { return strings.Contains(stderr.String(), "only ports of the sandbox itself") })
	if got := w.ssh(nil, "-o", "ExitOnForwardFailure=yes", "-R", "8081:localhost:1", w.host(), "true"); got.code != 255 || !strings.Contains(got.err, "remote port forwarding failed") {
		t.Errorf("remote forwarding: %+v", got)
	}
	if got := w.ssh(nil, "-W", "localhost:49983", w.host()); got.code != 255 || !strings.Contains(got.err, "agent's port") {
		t.Errorf("the agent's port: %+v", got)
	}
}

func page(t *testing.T, address string) (string, error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/", nil)
	if err != nil {
		return "", err
	}
	res, err := (&http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return string(b), err
}

// testSSHPasswords logs in by the API key, as `barchan ssh` does, and by the sandbox's access token.
func testSSHPasswords(t *testing.T, w *secureShell) {
	if out := w.must("ssh", w.id, "--", "echo", "by", "key"); out != "by key\n" {
		t.Errorf("barchan ssh prints %q", out)
	}
	if out, err := w.try("ssh", "-u", "root", w.id, "--", "id -u; exit 4"); err == nil || out != "0\n" {
		t.Errorf("barchan ssh as root: %q, %v", out, err)
	}
	_, text := w.call(w.localKey(), http.MethodGet, "/sandboxes/"+w.id, nil)
	_, token, _ := strings.Cut(text, `"envdAccessToken":"`)
	token, _, _ = strings.Cut(token, `"`)
	for password, fine := range map[string]bool{token: true, w.localKey(): true, token + "x": false, "": false} {
		c, err := w.dial(w.id, ssh.Password(password))
		if fine != (err == nil) {
			t.Errorf("password of %d bytes: %v", len(password), err)
		}
		if err == nil {
			_ = c.Close()
		}
	}
	for _, id := range []string{"aaaaaaaaaaaaaaaaaaaa", "", "root", w.id + "x"} {
		if _, err := w.dial(id, ssh.Password(w.localKey())); err == nil {
			t.Errorf("user %q is let in", id)
		}
	}
}

// dial connects as a client of our own.
func (w *secureShell) dial(user string, auth ssh.AuthMethod) (*ssh.Client, error) {
	return ssh.Dial("tcp", w.server.ssh, &ssh.ClientConfig{User: user, Auth: []ssh.AuthMethod{auth}, HostKeyCallback: ssh.InsecureIgnoreHostKey(), Timeout: startTime})
}

// testSSHSignals sends a signal, which ssh itself cannot, and breaks off.
func testSSHSignals(t *testing.T, w *secureShell) {
	c, err := w.dial(w.id, ssh.Password(w.localKey()))
	if err != nil {
		t.Fatal(err)
	}
	session, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	out, _ := session.StdoutPipe()
	if err := session.Start(`trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done`); err != nil {
		t.Fatal(err)
	}
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, ready); err != nil {
		t.Fatal(err)
	}
	if err := session.Signal(ssh.SIGINT); err != nil {
		t.Error(err)
	}
	rest, _ := io.ReadAll(out)
	err = session.Wait()
	if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.ExitStatus() != 5 || string(rest) != "got\n" {
		t.Errorf("after SIGINT: %q, %v", rest, err)
	}
	// A terminal hangs up when its client breaks off.
	if session, err = c.NewSession(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(session.RequestPty("xterm", 24, 80, nil), session.Start("echo $$ >/tmp/hang; sleep 600")); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the program", func() bool { return w.ssh(nil, w.host(), "test -s /tmp/hang").code == 0 })
	_ = c.Close()
	eventually.True(t, "the hangup", func() bool { return w.ssh(nil, w.host(), "kill -0 $(cat /tmp/hang)").code != 0 })
}

// testSSHPaused has a connection wake a sandbox that wants it, and refuses others with a sentence.
func testSSHPaused(t *testing.T, w *secureShell) {
	w.must("pause", w.id)
	if got := w.ssh(nil, w.host(), "true"); got.code != 255 || !strings.Contains(got.err, "barchan resume "+w.id) {
		t.Errorf("a paused sandbox: %+v", got)
	}
	w.must("resume", w.id)
	w.mustKubectl(strings.ReplaceAll(idleManifest, "idler", "ssh-idler"), "apply", "-f", "-")
	other := *w
	other.id = w.idOf("ssh-idler")
	w.untilServed(other.id, "/")
	eventually.NoError(t, "it is paused", func() error {
		phase, err := w.kubectl("", "get", "sandbox", "ssh-idler", "-o", "jsonpath={.status.barchan.phase}")
		if err == nil && phase != "Paused" {
			err = fmt.Errorf("phase %q", phase)
		}
		return err
	})
	w.want(other.ssh(nil, other.host(), "sleep 3; echo awake"), "awake\n", 0) // longer than its idle time
	w.mustKubectl("", "delete", "sandbox", "ssh-idler")
}

// testSSHRefusals compares refusals, and ends sessions with their sandbox.
func testSSHRefusals(t *testing.T, w *secureShell, before ran, fingerprint string) {
	none := *w
	none.id = "aaaaaaaaaaaaaaaaaaaa"
	text, err := os.ReadFile(w.config)
	if err != nil {
		t.Fatal(err)
	}
	stranger := *w
	stranger.config = w.write("stranger", strings.ReplaceAll(string(text), filepath.Join(w.dir, "key"), filepath.Join(w.dir, "other")))
	otherKey := stranger.ssh(nil, w.host(), "true")
	noSandbox := none.ssh(nil, none.host(), "true")
	for name, got := range map[string]ran{"a key that is not registered yet": before, "another key": otherKey, "no such sandbox": noSandbox} {
		if text := strings.ReplaceAll(got.err, none.id, w.id); got.code != 255 || !strings.Contains(text, "Permission denied (") || text != before.err {
			t.Errorf("%s: %+v, want %+v", name, got, before)
		}
	}
	cmd := w.command("ssh", w.host(), "echo begun; sleep 600")
	var out, stderr lockedText
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	forward := w.command("ssh", "-N", w.host())
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the session", func() bool { return out.String() == "begun\n" })
	w.must("kill", w.id)
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 255 || !strings.Contains(stderr.String(), "the sandbox was paused or removed") {
		t.Errorf("a session of a killed sandbox: %v, %q", err, stderr.String())
	}
	if err := forward.Wait(); forward.ProcessState.ExitCode() != 255 {
		t.Errorf("a connection to a killed sandbox: %v", err)
	}
	w.must("ssh-key", "rm", fingerprint)
	if list := w.data("ssh-key", "ls"); strings.Contains(list, fingerprint) {
		t.Errorf("a removed key is listed:\n%s", list)
	}
	if out, err := w.tryIn("ssh-rsa AAAA short", "ssh-key", "add", "-"); err == nil || !strings.Contains(out, "publicKey") {
		t.Errorf("a key that is none: %q, %v", out, err)
	}
	if out, err := w.try("ssh-key", "add", filepath.Join(w.dir, "key")); err == nil || !strings.Contains(out, "private key") {
		t.Errorf("a private key: %q, %v", out, err)
	}
}

// lockedText is output that is read while a program writes it.
type lockedText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
