package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

// TestMainJob is the quick start: the first program, the SDK, kubectl, a restart in the middle.
// The parts share one server and follow each other. It is not parallel, so that it comes first.
func TestMainJob(t *testing.T) {
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	t.Run("run without an SDK", func(t *testing.T) {
		s := s.in(t)
		out, err := s.try("run", "--", "python3", "-c", "print(6*7)")
		if err != nil || strings.TrimSpace(out) != "42" {
			t.Errorf("run = %q, %v", out, err)
		}
		if out := s.must("run", "--", "uname", "-a"); !strings.Contains(out, "Linux") {
			t.Errorf("uname returned %q", out)
		}
		if out, err := s.try("run", "--", "sh", "-c", "exit 7"); exitCode(err) != 7 {
			t.Errorf("exit code of run = %v\n%s", err, out)
		}
		if out, err := s.tryIn("through stdin", "run", "-i", "--", "cat"); err != nil || out != "through stdin" {
			t.Errorf("run -i cat = %q, %v", out, err)
		}
	})
	t.Run("the unmodified SDK", func(t *testing.T) { runSDK(t, "main.test.mjs", s.in(t).clientEnv()) })
	t.Run("the unmodified SDK over TLS and domains", func(t *testing.T) { runSDK(t, "tls.test.mjs", s.in(t).clientEnv("--tls")) })
	t.Run("kubectl", func(t *testing.T) { testKubectl(t, s.in(t)) })
	t.Run("commands", func(t *testing.T) { testCommands(t, s.in(t)) })
	t.Run("restart in the middle", func(t *testing.T) {
		testRestart(t, s.in(t), syscall.SIGTERM)
		testRestart(t, s.in(t), syscall.SIGKILL)
	})
	t.Run("bad input", func(t *testing.T) { testBadInput(t, s.in(t)) })
}

func exitCode(err error) int {
	if e, ok := err.(*exec.ExitError); ok { //nolint:errorlint // exec returns it bare
		return e.ExitCode()
	}
	return -1
}

// runSDK runs a suite of node's test runner against the server.
func runSDK(t *testing.T, file string, env []string) {
	t.Helper()
	installSDK(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", "--import", "./resolve.mjs", "--test", "--test-reporter", "spec", file)
	cmd.Dir, cmd.Env = "sdk", env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // the suite runs in a child, which holds our pipe
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", file, err, out)
		return
	}
	t.Logf("%s", out)
}

// installSDK puts the clients of the lock file beside the suites.
func installSDK(t *testing.T) {
	t.Helper()
	npm.Link(t, "sdk")
}

// kubectl finds the real one, built from its Go module.
func kubectl(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan"} {
		if path := filepath.Join(dir, "bin", "kubectl"); dir != "" {
			if _, err := os.Stat(path); err == nil {
				return path
			}
		}
	}
	path, err := exec.LookPath("kubectl")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("kubectl is needed: make kubectl")
		}
		t.Skip("SKIPPED: kubectl is not built; run `make kubectl`")
	}
	return path
}

const sandboxManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: by-kubectl, labels: {suite: kubectl}}
spec:
  podTemplate:
    metadata: {labels: {app: demo}}
    spec:
      containers:
      - name: main
        image: barchan.local/base:latest
        command: [python3, -m, http.server, "8080"]
        workingDir: /home/user
        env: [{name: COLOR, value: green}]
        ports: [{containerPort: 8080}]
        resources: {limits: {cpu: 500m, memory: 256Mi}}
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
        volumeMounts: [{name: scratch, mountPath: /scratch}]
      volumes: [{name: scratch, emptyDir: {}}]
`

func testKubectl(t *testing.T, s *server) {
	program := kubectl(t)
	env := s.clientEnv()
	run := func(stdin string, args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience+startTime) // it reports itself what it waited for
		defer cancel()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Env, cmd.Stdin = env, strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	must := func(stdin string, args ...string) string {
		t.Helper()
		out, err := run(stdin, args...)
		if err != nil {
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	must(sandboxManifest, "apply", "-f", "-")
	must("", "wait", "--for=condition=Ready", "sandbox/by-kubectl", patience)
	if out := must("", "get", "sandboxes", "-A"); !strings.Contains(out, "by-kubectl") || !strings.Contains(out, "DependenciesReady") {
		t.Errorf("kubectl get sandboxes -A:\n%s", out)
	}
	id := strings.TrimSpace(must("", "get", "sandbox", "by-kubectl", "-o", "jsonpath={.status.barchan.id}"))
	if out := s.must("exec", id, "--", "sh", "-c", "echo $COLOR; ls -d /scratch; curl -s -o /dev/null -w '%{http_code}' 127.0.0.1:8080/"); out != "green\n/scratch\n200" {
		t.Errorf("inside: %q", out)
	}
	must("", "patch", "sandbox", "by-kubectl", "--type=merge", "-p", `{"spec":{"operatingMode":"Suspended"}}`)
	must("", "wait", "--for=condition=Suspended", "sandbox/by-kubectl", patience)
	must("", "patch", "sandbox", "by-kubectl", "--type=merge", "-p", `{"spec":{"operatingMode":"Running"}}`)
	must("", "wait", "--for=condition=Ready", "sandbox/by-kubectl", patience)
	if out, err := run(strings.ReplaceAll(sandboxManifest, "emptyDir: {}", "hostPath: {path: /}"), "apply", "-f", "-"); err == nil || !strings.Contains(out, "spec.podTemplate.spec.volumes[0]") {
		t.Errorf("a host path was not refused by its field: %v\n%s", err, out)
	}
	patch := `[{"op": "replace", "path": "/spec/podTemplate/spec/containers/0/image", "value": "another"}]`
	if out, err := run("", "patch", "sandbox", "by-kubectl", "--type=json", "-p", patch); err == nil || !strings.Contains(out, "spec.podTemplate.spec.containers[0].image") {
		t.Errorf("an image that would not be applied was not refused by its field: %v\n%s", err, out)
	}
	greedy := strings.NewReplacer("by-kubectl", "greedy", "cpu: 500m", `cpu: "10000"`).Replace(sandboxManifest)
	if out, err := run(greedy, "apply", "-f", "-"); err == nil || !strings.Contains(out, "spec.podTemplate.spec.containers[0].resources.limits[cpu]") || !strings.Contains(out, "this machine has") {
		t.Errorf("more CPUs than the machine has were not refused by their field: %v\n%s", err, out)
	}
	must("", "delete", "sandbox", "by-kubectl", patience)
	if out, err := run("", "get", "sandbox", "by-kubectl"); err == nil || !strings.Contains(out, "NotFound") {
		t.Errorf("after delete: %v\n%s", err, out)
	}
	must(failingManifest, "apply", "-f", "-")
	must("", "wait", `--for=jsonpath={.status.conditions[?(@.type=="Ready")].reason}=PodFailed`, "sandbox/fails", patience)
	if out := must("", "get", "sandbox", "fails", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")]}`); !strings.Contains(out, "ended with code 9") || !strings.Contains(out, `"status":"False"`) {
		t.Errorf("of an entrypoint that failed it returned %s", out)
	}
	must("", "delete", "sandbox", "fails", patience)
}

const failingManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: fails}
spec: {podTemplate: {spec: {containers: [{name: main, image: "barchan.local/base:latest", command: [sh, -c, exit 9]}]}}}
`

func testCommands(t *testing.T, s *server) {
	id := strings.TrimSpace(s.must("run", "--keep"))
	if out := s.must("ls"); !strings.Contains(out, id) {
		t.Fatalf("ls does not show %s:\n%s", id, out)
	}
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("carried"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.must("cp", file, id+":/home/user/there")
	if out := s.must("exec", id, "--", "cat", "/home/user/there"); out != "carried" {
		t.Errorf("after cp: %q", out)
	}
	s.must("cp", id+":/home/user/there", file+".back")
	if b, err := os.ReadFile(file + ".back"); err != nil || string(b) != "carried" {
		t.Errorf("back again: %q, %v", b, err)
	}
	s.must("pause", id)
	if out := s.must("show", id); !strings.Contains(out, "paused") {
		t.Errorf("show after pause:\n%s", out)
	}
	s.must("resume", id)
	s.must("kill", id)
	if out, err := s.try("show", id); err == nil {
		t.Errorf("show after kill:\n%s", out)
	}
	for _, args := range [][]string{{"status"}, {"status", "--json"}, {"config"}, {"image", "ls"}, {"key", "ls"}, {"template", "ls"}, {"pool", "ls"}, {"version"}, {"doctor"}} {
		s.must(args...)
	}
}

// testRestart ends the server and starts it again: what ran still runs, with its processes,
// its address, its token and its timeout.
func testRestart(t *testing.T, s *server, sig syscall.Signal) {
	t.Helper()
	env := s.clientEnv()
	script := func(code string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), startTime)
		defer cancel()
		cmd := exec.CommandContext(ctx, "node", "-e", "import('e2b').then(async ({Sandbox}) => {"+code+"; process.exit(0)}).catch((e) => { console.error(e); process.exit(1) })")
		cmd.Dir, cmd.Env = "sdk", env
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s\n%s", code, err, out, s.tail())
		}
		return strings.TrimSpace(string(out))
	}
	id := script(`const s = await Sandbox.create({timeoutMs: 600000}); await s.commands.run('echo $$ > /tmp/pid; exec sleep 9999', {background: true, timeoutMs: 0});
		while (!(await s.files.exists('/tmp/pid'))) {}
		console.log(s.sandboxId)`)
	paused := script(`const s = await Sandbox.create({timeoutMs: 600000}); await s.files.write('kept', 'yes'); await s.pause(); console.log(s.sandboxId)`)
	before := script(`console.log((await Sandbox.getInfo('` + id + `')).endAt.toISOString())`)
	s.stop(sig)
	s.start()
	if alive := script(`const s = await Sandbox.connect('` + id + `', {timeoutMs: 1000}); console.log((await s.commands.run('kill -0 $(cat /tmp/pid) && echo alive')).stdout.trim())`); alive != "alive" {
		t.Errorf("after %v the process is %q", sig, alive)
	}
	if after := script(`console.log((await Sandbox.getInfo('` + id + `')).endAt.toISOString())`); after != before {
		t.Errorf("after %v the timeout is %s, was %s", sig, after, before)
	}
	if kept := script(`const s = await Sandbox.connect('` + paused + `'); console.log(await s.files.read('kept')); await s.kill()`); kept != "yes" {
		t.Errorf("after %v the paused sandbox kept %q", sig, kept)
	}
	script(`await Sandbox.kill('` + id + `')`)
}

func testBadInput(t *testing.T, s *server) {
	t.Run("a second server on the same data", func(t *testing.T) {
		out, err := s.try("up", "--http-addr", "127.0.0.1:0", "--ssh-addr", "", "--tls-addr", "127.0.0.1:0", "--kube-addr", "127.0.0.1:0")
		if err != nil || !strings.Contains(out, "already up on "+s.value("BARCHAN_DATA_DIR")) {
			t.Errorf("up = %v\n%s", err, out)
		}
	})
	t.Run("a port in use", func(t *testing.T) {
		out, err := s.try("up", "--data-dir", filepath.Join(s.dir, "o"), "--ssh-addr", "", "--tls-addr", "127.0.0.1:0", "--kube-addr", "127.0.0.1:0")
		if err == nil || !strings.Contains(out, s.http) || !strings.Contains(out, "in use") {
			t.Errorf("up = %v\n%s", err, out)
		}
	})
	for name, give := range map[string]struct {
		args []string
		want string
	}{
		"unknown template": {[]string{"run", "--template", "nope", "--", "true"}, "nope"},
		"unknown sandbox":  {[]string{"exec", "i0000000000000000000", "--", "true"}, "i0000000000000000000"},
		"no command":       {[]string{"run"}, "usage"},
		"bad timeout":      {[]string{"run", "--timeout", "0s", "--", "true"}, "imeout"},
		"wrong key":        {[]string{"ls", "--api-key", "e2b_0000000000000000000000000000000000000000", "--api-url", "http://" + s.http}, "key"},
		"unknown image":    {[]string{"image", "rm", "no.such/image:1"}, "no.such/image:1"},
		"bad setting":      {[]string{"up", "--subnet", "banana"}, "subnet"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := s.try(give.args...)
			if err == nil || !strings.Contains(strings.ToLower(out), strings.ToLower(give.want)) {
				t.Errorf("barchan %s = %v, want it to name %q\n%s", strings.Join(give.args, " "), err, give.want, out)
			}
		})
	}
	if out := s.must("ls"); strings.Contains(out, "nope") {
		t.Errorf("a refused create left something:\n%s", out)
	}
}
