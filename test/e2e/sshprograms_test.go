package e2e

import (
	"bufio"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// testSSHGit pushes to a repository in a sandbox, and clones it.
func testSSHGit(t *testing.T, w *secureShell) {
	w.want(w.ssh(nil, w.host(), "git init -q --bare -b main repo.git"), "", 0)
	git := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir = w.dir
		cmd.Env = append(os.Environ(), "HOME="+w.dir, "GIT_SSH_COMMAND=ssh -F "+w.config, "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	git("init", "-q", "-b", "main", "here")
	w.write("here/file", strings.Repeat("line\n", 1<<18))
	git("-C", "here", "add", ".")
	git("-C", "here", "commit", "-qm", "one")
	git("-C", "here", "push", "-q", w.host()+":repo.git", "main")
	git("clone", "-q", w.host()+":repo.git", "there")
	if info, err := os.Stat(filepath.Join(w.dir, "there/file")); err != nil || info.Size() != 5<<18 {
		t.Errorf("the clone: %v, %v", info, err)
	}
}

// testSSHEditor does what the remote modes of editors do: one connection with a shell, whose standard input has a script that starts a server and
// prints its port, and with dynamic forwarding, by which the editor reaches that port.
func testSSHEditor(t *testing.T, w *secureShell) {
	socks := program.Address(t)
	cmd := w.command("ssh", "-T", "-D", socks, w.host(), "bash")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	script := "mkdir -p ~/.editor/bin && cd ~/.editor\n# " + strings.Repeat("x", 100<<10) + "\n" + // such scripts are long
		"cat >bin/server <<'END'\nimport http.server\ns = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n" +
		"print('listeningOn==%d==' % s.server_port, flush=True)\ns.serve_forever()\nEND\n" +
		"uname -s\necho edited >page\nnohup python3 bin/server 2>/dev/null </dev/null &\nwait\n"
	if _, err := io.WriteString(stdin, script); err != nil {
		t.Fatal(err)
	}
	var lines []string
	port := ""
	for out := bufio.NewScanner(stdout); port == "" && out.Scan(); {
		lines = append(lines, out.Text())
		if rest, ok := strings.CutPrefix(out.Text(), "listeningOn=="); ok {
			port = strings.TrimSuffix(rest, "==")
		}
	}
	if port == "" || lines[0] != "Linux" {
		t.Fatalf("the script printed %q", lines)
	}
	through := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "socks5", Host: socks})}}
	defer through.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+"/page", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := through.Do(req)
	if err != nil {
		t.Fatalf("through -D: %v", err)
	}
	defer func() { _ = res.Body.Close() }()
	if b, err := io.ReadAll(res.Body); err != nil || string(b) != "edited\n" {
		t.Errorf("through -D: %q, %v", b, err)
	}
}
