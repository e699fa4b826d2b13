package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const (
	id1 = "iaaa0000000000000001"
	id2 = "iaab0000000000000002"
)

func TestStatusAndEnv(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.run("", "status").want(t, 0, "State         ready\n", "")
	s.run("", "status").want(t, 0, "Sandboxes     1 running\n", "")
	var st adminclient.Status
	if err := json.Unmarshal([]byte(s.run("", "status", "--json").stdout), &st); err != nil || st.Version != "1.2.3" {
		t.Errorf("%+v, %v", st, err)
	}
	url := "http://" + s.status.Addresses.HTTP
	s.run("", "env").want(t, 0, "export E2B_API_KEY='"+testKey+"'\n", "")
	s.run("", "env").want(t, 0, "export E2B_API_URL='"+url+"'\nexport E2B_SANDBOX_URL='"+url+"'\nexport E2B_VOLUME_API_URL='"+url+"'\nexport E2B_DOMAIN='barchan.localhost:7743'\n", "")
	s.run("", "env", "--shell", "fish").want(t, 0, "set -gx KUBECONFIG '"+s.dir+"/kubeconfig';\n", "")
	tls := s.run("", "env", "--tls")
	tls.want(t, 0, "export NODE_EXTRA_CA_CERTS='/data/ca.pem'\n# ", "")
	if strings.Contains(tls.stdout, "export E2B_API_URL") {
		t.Errorf("--tls names the plain URL: %s", tls.stdout)
	}
	tls.want(t, 0, "unset E2B_API_URL\nunset E2B_SANDBOX_URL\n", "")
	s.run("", "env", "--tls", "--shell", "fish").want(t, 0, "set -e E2B_API_URL;\n", "")
	s.run("", "env", "--tls", "--shell", "csh").want(t, 0, "setenv E2B_API_KEY '"+testKey+"';\n", "")
	s.run("", "env", "--tls", "--shell", "csh").want(t, 0, "unsetenv E2B_API_URL;\n", "")
	s.run("", "--api-key", tenantKey, "env").want(t, 0, "export E2B_API_KEY='"+tenantKey+"'\n", "")
	s.run("", "--api-key", "e2b_none", "env").want(t, 1, "", "barchan: check the key that was given (--api-key, BARCHAN_API_KEY): Invalid API key\n")
	var vars map[string]string
	if err := json.Unmarshal([]byte(s.run("", "env", "--shell=json").stdout), &vars); err != nil || vars["E2B_API_URL"] != url {
		t.Errorf("%v, %v", vars, err)
	}
	s.status.Addresses.TLS = ""
	s.run("", "env", "--tls").want(t, 1, "", "barchan: the server does not serve TLS; set tlsAddr and start it again\n")
	s.status.Ready, s.status.Phase = false, "caches"
	s.run("", "env").want(t, 1, "", `still starting (phase "caches")`)
	s.run("", "up").want(t, 0, "", "barchan 1.2.3 is already up on "+s.dir)
}

func TestList(t *testing.T) {
	s := newServer(t, nil)
	s.run("", "ls").want(t, 0, "", "no sandboxes")
	s.run("", "ls", "--json").want(t, 0, "[]\n", "")
	s.add(id1, "running", map[string]string{"user": "ann", "n": "1"})
	s.add(id2, "paused", nil)
	s.run("", "ls").want(t, 0, ""+
		"ID                     NAME      TEMPLATE   STATE     AGE   ENDS IN   CPU   MEMORY      METADATA\n"+
		id1+"   sb-0001   base       running   90m   10m       1     512.0 MiB   n=1,user=ann\n"+
		id2+"   sb-0002   base       paused    90m   -         1     512.0 MiB   -\n", "")
	s.run("", "ps", "-o", "wide").want(t, 0, "METADATA       DISK   TEMPLATE ID   STARTED\n", "")
	s.exactly(t, id1+"\n"+id2+"\n", "list", "-q")
	s.exactly(t, "sb-0001\nsb-0002\n", "ls", "-o", "name")
	s.exactly(t, s.run("", "ls", "--json").stdout, "ls", "-o", "json")
	s.run("", "ls", "-o", "yaml").want(t, 2, "", "barchan: invalid argument \"yaml\" for \"-o, --output\" flag: want json, name or wide\nusage: barchan ls")
	s.run("", "ls", "--state", "paused", "--json").want(t, 0, id2, "")
	if r := s.run("", "ls", "--metadata", "user=ann"); strings.Contains(r.stdout, id2) || !strings.Contains(r.stdout, id1) {
		t.Errorf("filtered: %s", r.stdout)
	}
	s.run("", "ls", "--state", "dead").want(t, 2, "", `--state: "dead" is neither running nor paused`)
	s.run("", "show", id1).want(t, 0, "Uses         12% CPU, 1.0 MiB memory, 2.0 KiB disk\n", "")
	s.run("", "show", "--json", "iaaa").want(t, 0, `"sandboxID": "`+id1+`"`, "")
	s.run("", "--api-key", "wrong", "ls").want(t, 1, "", "barchan: Invalid API key\n")
}

func TestPrefixes(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.add(id2, "running", nil)
	s.run("", "pause", "iaab").want(t, 0, id2+"\n", "")
	s.run("", "pause", "iaab").want(t, 1, "", "barchan: Sandbox is already paused\n")
	s.run("", "resume", "iaab").want(t, 0, id2+"\n", "")
	s.run("", "kill", "iaa").want(t, 1, "", `barchan: "iaa" begins the IDs of 2 sandboxes; give more of one: `+id1+", "+id2+"\n")
	s.run("", "kill", "nope", "iaab").want(t, 1, id2+"\n", `no sandbox has the name "nope", or an ID that begins so`)
	s.run("", "kill", id2).want(t, 1, "", "doesn't exist or you don't have access")
	s.run("", "kill", "--all").want(t, 0, id1+"\n", "")
	if len(s.sandboxes) != 0 {
		t.Errorf("%d left", len(s.sandboxes))
	}
	s.run("", "kill").want(t, 2, "", "want either SANDBOX or --all")
}

func TestRemoteServer(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	t.Setenv("BARCHAN_API_URL", s.front.URL)
	var out, errOut strings.Builder
	args := []string{"--data-dir", "/nonexistent", "ls"}
	if code := Run(t.Context(), args, nil, &out, &errOut, app.Deps{}); code != 1 || !strings.Contains(errOut.String(), "set BARCHAN_API_KEY or --api-key") {
		t.Errorf("without a key: %d %s", code, errOut.String())
	}
	t.Setenv("BARCHAN_API_KEY", testKey)
	if code := Run(t.Context(), args, nil, &out, &errOut, app.Deps{}); code != 0 || !strings.Contains(out.String(), id1) {
		t.Errorf("%d %s %s", code, out.String(), errOut.String())
	}
}

func TestImages(t *testing.T) {
	s := newServer(t, nil)
	pull := s.run("", "image", "pull", "reg.test/a:1")
	pull.want(t, 0, "reg.test/a:1\n", "pull 100% of 100 B\n")
	if n := strings.Count(pull.stderr, "\n"); n > 12 {
		t.Errorf("%d lines of progress where no terminal is", n)
	}
	s.run("pass word\n", "image", "pull", "reg.test/b:1", "--username", "u", "--password-stdin").want(t, 0, "reg.test/b:1\n", "")
	s.run("", "image", "pull", "reg.test/b:1", "--username", "u").want(t, 1, "", "add --password-stdin")
	s.run("wrong", "image", "pull", "reg.test/b:1", "--username", "u", "--password-stdin").want(t, 1, "", "barchan: the registry refused u\n")
	s.run("0123456789", "image", "import", "-", "--name", "x").want(t, 0, "x\n", "")
	file := filepath.Join(t.TempDir(), "i.tar")
	if err := os.WriteFile(file, make([]byte, 2048), 0o600); err != nil {
		t.Fatal(err)
	}
	s.run("", "image", "import", file, "--name", "y").want(t, 0, "y\n", "send 100% of 2.0 KiB")
	s.run("", "image", "import", "/nonexistent").want(t, 1, "", "no such file")
	s.run("", "image", "build", "base", "--json").want(t, 0, `"ref": "base:latest"`, "")
	s.run("", "image", "ls").want(t, 0, "reg.test/a:1   0123456789ab   3.0 MiB   3m    2m          pulled\n", "")
	s.run("", "image", "export", "hello", "-", "--name", "n").want(t, 0, "default/hello as n", "")
	s.run("", "image", "export", "none", filepath.Join(t.TempDir(), "none.tar")).want(t, 1, "", "barchan: no template or image none")
	s.run("", "image", "export", "hello").want(t, 2, "", "FILE is missing")
	s.run("", "image", "push", "hello", "NOT:valid:name").want(t, 1, "", "NOT:valid:name")
	s.run("", "image", "push", "hello", "reg.test/a", "--password-stdin").want(t, 2, "", "--password-stdin needs --username")
	s.run("", "image", "prune", "--json").want(t, 0, `"ref": "reg.test/b:1"`, "")
	s.run("", "image", "prune").want(t, 0, "", "")
	s.run("", "image", "rm", "none", "x").want(t, 1, "x\n", "barchan: image \"none\" not found; `barchan image ls` lists them\n")
}

func TestRun(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.run("", "run", "--", "sh", "-c", "echo out; echo err >&2; exit 3").want(t, 3, "out\n", "err\n")
	s.run("", "run", "-e", "A=b c", "-w", "/", "--timeout", "90s", "--metadata", "k=v", "--", "sh", "-c", `echo "$A" $PWD`).want(t, 0, "b c /\n", "")
	n := s.created[len(s.created)-1]
	if n.Timeout != 90*time.Second || n.Metadata["k"] != "v" || n.TemplateID != "base" {
		t.Errorf("created %+v", n)
	}
	if len(s.sandboxes) != 0 {
		t.Errorf("%d sandboxes are left", len(s.sandboxes))
	}
	s.run("", "run", "--keep", "--", "true").want(t, 0, "", "sandbox i000")
	if len(s.sandboxes) != 1 {
		t.Errorf("--keep: %d sandboxes", len(s.sandboxes))
	}
	s.run("", "run", "--template", "nope", "--", "true").want(t, 1, "", "barchan: template 'nope' not found\n")
	s.run("", "run", "--timeout", "1ms", "--", "true").want(t, 2, "", "--timeout: 1ms is too short")
	s.run("", "run", "-e", "=x", "--", "true").want(t, 2, "", `"=x" is neither NAME=VALUE`)
	s.run("", "run", "-t", "--", "true").want(t, 2, "", "-t: standard input and output are not a terminal")
	s.run("", "run").want(t, 2, "", "COMMAND is missing")
	s.run("", "run", "--", "/no/such/program").want(t, 127, "", "/no/such/program")
}

func TestRunPassesInputOn(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.run("one\ntwo\n", "run", "-i", "--", "wc", "-l").want(t, 0, "2\n", "")
	big := strings.Repeat("0123456789abcdef", 40_000)
	if r := s.run(big, "run", "-i", "--", "cat"); r.stdout != big {
		t.Errorf("%d bytes of %d came back", len(r.stdout), len(big))
	}
	// A command that ends before its input does, and one that needs none.
	s.run(big, "run", "-i", "--", "true").want(t, 0, "", "")
	s.run("ignored", "run", "--", "cat").want(t, 0, "", "")
	// A pipe is passed on without a flag, and one that stays open holds nothing up.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close(); _ = r.Close() }()
	if _, err := io.WriteString(w, "hello\n"); err != nil {
		t.Fatal(err)
	}
	s.runContext(t.Context(), r, "run", "--", "head", "-1").want(t, 0, "hello\n", "")
}

// TestInterrupt is Ctrl-C in the middle of a command: the sandbox goes.
func TestInterrupt(t *testing.T) {
	s := newServer(t, startAgent(t))
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan int, 1)
	go func() {
		done <- Run(ctx, []string{"--data-dir", s.dir, "run", "--", "sh", "-c", "echo begun; sleep 60"}, strings.NewReader(""), w, io.Discard, app.Deps{})
		_ = w.Close()
	}()
	if _, err := io.ReadFull(r, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if code := <-done; code != 130 {
		t.Errorf("exit code %d", code)
	}
	if len(s.sandboxes) != 0 {
		t.Errorf("%d sandboxes are left", len(s.sandboxes))
	}
}

func TestExec(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	s.add(id2, "paused", nil)
	s.run("", "exec", "iaaa", "--", "echo", "--json", "-x").want(t, 0, "--json -x\n", "")
	s.run("", "exec", id1, "echo", "hi").want(t, 0, "hi\n", "")
	s.run("", "exec", "iaaa", "--", "sh", "-c", "kill -9 $$").want(t, 137, "", "")
	s.run("", "exec", "-u", "nobody-here", "iaaa", "--", "true").want(t, 1, "", "invalid username: 'nobody-here'")
	s.run("", "exec", "iaab", "--", "true").want(t, 1, "", "is paused; resume it with `barchan resume "+id2+"`")
	s.run("", "exec", "iaaa", "--").want(t, 2, "", "COMMAND is missing")
	// After its interrupt the command must not continue.
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan int, 1)
	mark := filepath.Join(t.TempDir(), "terminated")
	go func() {
		script := fmt.Sprintf("trap 'echo > %s; exit' TERM; echo begun; while :; do sleep 0.05; done", mark)
		done <- Run(ctx, []string{"--data-dir", s.dir, "exec", id1, "--", "sh", "-c", script}, strings.NewReader(""), w, io.Discard, app.Deps{})
		_ = w.Close()
	}()
	if _, err := io.ReadFull(r, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if code := <-done; code != 130 {
		t.Errorf("exit code %d", code)
	}
	eventually.True(t, "the command's end", func() bool { _, err := os.Stat(mark); return err == nil })
}

func TestCopy(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	local, remote := t.TempDir(), t.TempDir()
	write := func(name, content string, mode os.FileMode) string {
		t.Helper()
		file := filepath.Join(local, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return file
	}
	file := write("run.sh", "#!/bin/sh\necho ran\n", 0o755)
	s.run("", "cp", file, "iaaa:"+remote).want(t, 0, "", "") // into a directory
	s.run("", "exec", "iaaa", "--", remote+"/run.sh").want(t, 0, "ran\n", "")
	s.run("", "cp", file, "iaaa:"+remote+"/new/deep").want(t, 0, "", "")
	s.run("", "cp", "iaaa:"+remote+"/new/deep", "-").want(t, 0, "#!/bin/sh\necho ran\n", "")
	s.run("typed", "cp", "-", "iaaa:"+remote+"/typed").want(t, 0, "", "")
	s.run("", "cp", "iaaa:"+remote+"/typed", local).want(t, 0, "", "")
	if b, err := os.ReadFile(filepath.Join(local, "typed")); string(b) != "typed" {
		t.Errorf("%q, %v", b, err)
	}

	write("tree/a/b/file", "deep", 0o644)
	write("tree/tool", "x", 0o700)
	if err := os.Symlink("a/b/file", filepath.Join(local, "tree/link")); err != nil {
		t.Fatal(err)
	}
	s.run("", "cp", filepath.Join(local, "tree"), "iaaa:"+remote+"/tree").want(t, 0, "", "")
	s.run("", "cp", filepath.Join(local, "tree"), "iaaa:"+remote+"/tree").want(t, 0, "", "") // now into it
	back := filepath.Join(local, "back")
	s.run("", "cp", "iaaa:"+remote+"/tree", back).want(t, 0, "", "")
	for _, name := range []string{"a/b/file", "tree/a/b/file", "link", "tree/link"} {
		if b, err := os.ReadFile(filepath.Join(back, name)); string(b) != "deep" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if info, err := os.Stat(filepath.Join(back, "tool")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info, err)
	}
	s.mu.Lock()
	staged := slices.Clone(s.staged)
	s.mu.Unlock()
	if len(staged) != 2 {
		t.Errorf("%v were sent for two directories", staged)
	}
	for _, file := range staged {
		if _, err := os.Stat(file); !os.IsNotExist(err) {
			t.Errorf("left behind: %s, %v", file, err)
		}
	}

	s.run("", "cp", "iaaa:/nonexistent/f", local).want(t, 1, "", "/nonexistent/f")
	s.run("", "cp", "/nonexistent/f", "iaaa:/tmp/f").want(t, 1, "", "/nonexistent/f: no such file")
	s.run("", "cp", "a", "b").want(t, 2, "", "one of SOURCE and DESTINATION must be SANDBOX:PATH")
}

func TestLogs(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s.logs = []client.LogEntry{{Timestamp: at, Message: "one", Level: "info"}, {Timestamp: at, Message: "one", Level: "info"}, {Timestamp: at.Add(time.Second), Message: "two"}}
	if r := s.run("", "logs", "iaaa"); r.stdout != "one\none\ntwo\n" {
		t.Errorf("%q", r.stdout)
	}
	s.add(id2, "paused", nil)
	s.run("", "logs", id2).want(t, 1, "", "barchan: sandbox "+id2+" is paused; resume it with `barchan resume "+id2+"`\n")
	s.run("", "logs", "--json", "iaaa").want(t, 0, `"message":"two"`, "")
	// Following, every line comes once, until the sandbox is gone.
	r, w := io.Pipe()
	done := make(chan int, 1)
	go func() {
		done <- Run(t.Context(), []string{"--data-dir", s.dir, "logs", "-f", id1}, nil, w, io.Discard, app.Deps{})
		_ = w.Close()
	}()
	first := make([]byte, len("one\none\ntwo\n"))
	if _, err := io.ReadFull(r, first); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.logs = append(s.logs, client.LogEntry{Timestamp: at.Add(time.Second), Message: "three"})
	s.mu.Unlock()
	next := make([]byte, len("three\n"))
	if _, err := io.ReadFull(r, next); err != nil || string(next) != "three\n" {
		t.Errorf("%q, %v", next, err)
	}
	s.mu.Lock()
	delete(s.sandboxes, id1)
	s.mu.Unlock()
	rest, err := io.ReadAll(r)
	if err != nil || len(rest) != 0 {
		t.Errorf("%q, %v", rest, err)
	}
	if code := <-done; code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestPort(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	_, port, err := net.SplitHostPort(s.status.Addresses.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	s.run("", "port", "iaaa", "8000").want(t, 0, "http://8000-"+id1+".barchan.localhost:"+port+"\n", "")
	s.run("", "port", "iaaa", "8000", "--tls").want(t, 0, "https://8000-"+id1+".barchan.localhost:7743\n", "")
	s.run("", "open", "iaaa", "8000").want(t, 0, "http://8000-"+id1+".barchan.localhost:"+port+"\n", "")
	s.run("", "port", "iaaa", "0").want(t, 2, "", `PORT: "0" is not a number`)
	s.run("", "port", "iaaa").want(t, 2, "", "PORT is missing")

	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan int, 1)
	go func() {
		done <- Run(ctx, []string{"--data-dir", s.dir, "port", id1, "8000", "--forward", "127.0.0.1:0"}, nil, io.Discard, w, app.Deps{})
		_ = w.Close()
	}()
	line := make([]byte, 200)
	n, err := r.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	local, _, _ := strings.Cut(string(line[:n]), " ")
	res, err := http.Get(local + "/a/path") //nolint:noctx // answers at once
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if b, err := io.ReadAll(res.Body); string(b) != "port 8000 of "+id1+", path /a/path" {
		t.Errorf("%q, %v", b, err)
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestDoctor(t *testing.T) {
	s := newServer(t, nil)
	s.run("", "doctor").want(t, 0, "server   ok      all well\n", "")
}

func TestDoctorDeep(t *testing.T) {
	s := newServer(t, nil)
	s.run("", "doctor", "--deep").want(t, 0, "Nothing is leaked.\n", "")
	s.run("", "doctor", "--deep", "--json").want(t, 0, "[]\n", "")
	s.mu.Lock()
	s.findings = []adminclient.Finding{{Where: adminclient.OnMachine, What: "link be0", Remedy: "mend it"}}
	s.mu.Unlock()
	s.run("", "doctor", "--deep").want(t, 1, "WHERE     WHAT       REMEDY\nmachine   link be0   mend it\n", "barchan: 1 found\n")
	s.run("", "doctor", "--deep", "--json").want(t, 1, `"what": "link be0"`, "barchan: 1 found\n")
}
