package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// nobody is the user of a server without root.
const nobody = 65534

// split divides a server that does not run: node keeps its sandboxes, and front, which has no root, all else.
func (s *server) split() (front, node *server) {
	t := s.t
	t.Helper()
	node = s
	if err := os.Chmod(node.dir, 0o711); err != nil { //nolint:gosec // what is in it has modes of its own
		t.Fatal(err)
	}
	front = &server{t: t, dir: filepath.Join(node.dir, "front"), bin: filepath.Join(node.dir, "barchan"), http: node.http, tls: node.tls, metrics: node.metrics, process: &process{uid: nobody}}
	data, user := filepath.Join(front.dir, "d"), strconv.Itoa(nobody)
	// The program is not written by this process: one that another test starts meanwhile would hold it open, as "text file busy".
	for _, line := range []string{
		"install -m 0755 " + node.bin + " " + front.bin,
		"install -d -m 0700 -o " + user + " " + front.dir + " " + data,
		"cd " + node.value("BARCHAN_DATA_DIR") + "; for x in apiserver credentials peers migrations.json; do if [ -e $x ]; then mv $x " + data + "/; fi; done",
		"chown -R " + user + " " + data,
	} {
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	node.set("BARCHAN_NODE_SOCKET", filepath.Join(node.dir, "socket", "node.sock"))
	front.env = slices.Clone(node.env)
	front.set("BARCHAN_DATA_DIR", data)
	node.http = program.Address(t)
	node.metrics = node.http
	for key, value := range map[string]string{
		"ROLE": "node", "HTTP_ADDR": node.http, "METRICS_ADDR": "", "API_KUBECONFIG": filepath.Join(data, "credentials", "node.kubeconfig"),
		"TOKEN_SECRET": filepath.Join(data, "credentials", "token-secret"), "NODE_SOCKET_GROUP": user,
	} {
		node.set("BARCHAN_"+key, value)
	}
	t.Cleanup(func() { // before the node's
		for _, s := range []*server{front, node} {
			if s.cmd == nil {
				s.start()
			}
		}
		if out, err := front.try("down", "--all", "--yes"); err != nil {
			t.Errorf("down --all: %v\n%s", err, out)
		}
		if err := <-front.done; err != nil {
			t.Errorf("the server ended with %v", err)
		}
		if t.Failed() {
			t.Logf("end of the server's log:\n%s", front.tail())
		}
	})
	return front, node
}

// TestNodeApart divides a server with a running sandbox: its node becomes a process of its own, and all else runs without root.
// Either may die then: the other goes on, and sandboxes too.
func TestNodeApart(t *testing.T) {
	t.Parallel()
	installSDK(t)
	whole := newServer(t)
	whole.start()
	whole.must("image", "build", "base")
	whole.apply(imageTemplate("witness", baseImage, "\n        command: [python3, -c, "+strconv.Quote(witness)+"]"))
	id := whole.create(whole.localKey(), "witness")
	nonce := func(s *server) string {
		t.Helper()
		word, _, _ := strings.Cut(s.untilServed(id, "/"), " ")
		return word
	}
	before := nonce(whole)
	whole.stop(syscall.SIGTERM)
	front, node := whole.split()
	same := func(when string) {
		t.Helper()
		if now := nonce(front); now != before {
			t.Errorf("%s the sandbox is another: %q, it was %q", when, now, before)
		}
	}

	front.start()
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(front.cmd.Process.Pid), "status"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\nUid:\t65534\t65534\t65534\t65534\n", "\nCapEff:\t0000000000000000\n"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the server's process lacks %q:\n%s", want, b)
		}
	}
	same("without a node")
	front.untilRefused("node", "its process does not answer")
	node.start()
	front.untilWell()
	same("with its node")
	if out, err := front.try("image", "ls"); err == nil || !strings.Contains(out, "--data-dir "+node.value("BARCHAN_DATA_DIR")) {
		t.Errorf("image ls of the server = %v, want where the images are:\n%s", err, out)
	}
	if out := front.must("doctor"); !strings.Contains(out, "at "+node.value("BARCHAN_DATA_DIR")) {
		t.Errorf("doctor of the server lacks its node:\n%s", out)
	}
	var status adminclient.Status
	front.read(&status, "status")
	if len(status.Components) != 1 || status.Components[0].State != "running" || status.Components[0].Path != node.value("BARCHAN_DATA_DIR") {
		t.Errorf("status of the server has %+v, want its node", status.Components)
	}

	node.stop(syscall.SIGKILL)
	front.untilRefused("node", "its process does not answer")
	if out := front.exec(id, "echo still here"); out != "still here" {
		t.Errorf("without its node the sandbox answers %q", out)
	}
	same("without its node")
	node.start()
	front.untilWell()
	front.stop(syscall.SIGKILL)
	front.start()
	same("after the server's end")

	front.mustBuild("apart", "built", "templateName: base", `{type: Run, args: ["echo apart > word"]}`, "", "")
	if _, out := front.keep("built", "sh", "-c", "cat ~/word"); out != "apart\n" {
		t.Errorf("in a sandbox of a built template: %q", out)
	}
	front.must("pause", id)
	front.must("resume", id)
	snapshot := front.snapshot(id, nil)
	code, text, _ := front.createFrom(front.localKey(), map[string]any{"templateID": snapshot})
	if code != http.StatusCreated {
		t.Errorf("create from a snapshot = %d %s", code, text)
	}
	same("after a pause and a snapshot")
	runSDK(t, "main.test.mjs", append(front.clientEnv(), "AT_ONCE=8"))
	for name, s := range map[string]*server{"server": front, "node": node} {
		eventually.NoError(t, "nothing of the "+name+" is leaked", func() error {
			out, err := s.try("doctor", "--deep")
			if err != nil {
				t.Logf("%s: %s", name, out)
			}
			return err
		})
	}
	front.must("kill", id)
	eventually.True(t, "the killed sandbox is gone from the node", func() bool { return node.processesOf(id) == 0 })
}
