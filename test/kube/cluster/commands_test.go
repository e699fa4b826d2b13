package cluster

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

// commands uses sandboxes by the command line, and by a terminal of the SDK, as on one machine.
func (b *barchan) commands() {
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: web, namespace: default}
spec:
  podTemplate:
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: "` + kubecluster.PodImage + `", args: [serve, ":8080"]}]
`)
	out := b.sdk(`
import { Sandbox } from 'e2b'
const sbx = await Sandbox.create()
let text = ''
const pty = await sbx.pty.create({ cols: 90, rows: 20, onData: (d) => { text += Buffer.from(d).toString() } })
await sbx.pty.sendInput(pty.pid, Buffer.from('echo "pty $((6*7)) $COLUMNS"; exit\n'))
await pty.wait().catch(() => {})
console.log(/pty 42 90/.test(text) ? 'a terminal' : text)
await sbx.kill()
console.log((await Sandbox.create('web', { timeoutMs: 300_000, metadata: { test: 'commands' } })).sandboxId)
`)
	id, ok := strings.CutPrefix(strings.TrimSpace(out), "a terminal\n")
	if !ok {
		b.Fatalf("the SDK printed %q", out)
	}
	if out := b.must("ls"); !strings.Contains(out, id) || !strings.Contains(out, "web") {
		b.Errorf("ls:\n%s", out)
	}
	if out := b.must("show", id); !strings.Contains(out, "commands") {
		b.Errorf("show:\n%s", out)
	}
	if out := b.must("exec", id, "--", "/pod", "echo", "in", "a", "Pod"); out != "in a Pod\n" {
		b.Errorf("exec: %q", out)
	}
	dir := b.TempDir()
	must(b.T, os.WriteFile(filepath.Join(dir, "in"), []byte("copied"), 0o600))
	b.must("cp", filepath.Join(dir, "in"), id+":/tmp/there")
	b.must("cp", id+":/tmp/there", filepath.Join(dir, "out"))
	if text, err := os.ReadFile(filepath.Join(dir, "out")); string(text) != "copied" {
		b.Errorf("copied out: %q, %v", text, err)
	}

	forward := b.cli("port", id, "8080", "--forward", "127.0.0.1:9007")
	must(b.T, forward.Start())
	eventually.NoError(b, "a forwarded port answers", func() error {
		got, err := b.Command(b.Context(), "curl", "-sS", "--max-time", "5", "http://127.0.0.1:9007/").CombinedOutput()
		if err != nil || !strings.HasPrefix(string(got), "web-") {
			return fmt.Errorf("%w: %s", err, got)
		}
		return nil
	})
	must(b.T, forward.Process.Signal(syscall.SIGINT))
	if err := forward.Wait(); err != nil && forward.ProcessState.ExitCode() != 130 {
		b.Errorf("the forward ended with %v", err)
	}
	b.must("kill", id)
	b.kubectl("delete", "sandboxtemplate", "web")
}

// cli is a command with the key of the REST API of a replica.
func (b *barchan) cli(args ...string) *exec.Cmd {
	cmd := b.Command(b.Context(), filepath.Join(b.bin, "barchan"), args...)
	cmd.Env = append(cmd.Env, "HOME="+b.TempDir(), "BARCHAN_API_URL="+b.replicas()[0], "BARCHAN_API_KEY="+b.key)
	return cmd
}

// must runs a command, and returns what it prints.
func (b *barchan) must(args ...string) string {
	b.Helper()
	cmd := b.cli(args...)
	var messages bytes.Buffer
	cmd.Stderr = &messages
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("barchan %s: %v\n%s%s", strings.Join(args, " "), err, out, &messages)
	}
	return string(out)
}
