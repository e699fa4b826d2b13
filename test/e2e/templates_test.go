package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const baseImage = "barchan.local/base:latest"

// runtimeTemplate has small limits, for what must hit them.
func runtimeTemplate(name, class string, memory string) string {
	return `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: ` + name + `}
spec:
  podTemplate:
    spec:
      runtimeClassName: ` + class + `
      containers:
      - name: main
        image: ` + baseImage + `
        resources: {limits: {cpu: 500m, memory: ` + memory + `}}
`
}

// pidsLimit is the setting of the server.
const pidsLimit = 200

// forkProgram forks until that fails, and prints how often it succeeded.
const forkProgram = `
import os, signal, sys
children = []
try:
    while len(children) < 3000:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        children.append(pid)
except OSError as e:
    print(e.errno)
print(len(children))
for pid in children:
    os.kill(pid, signal.SIGKILL)
`

// testPatchedCalls sees that gVisor patches the system calls of a program that makes them often, and leaves one that ends soon as it is:
// each patch copies a page of the program or of a library.
func testPatchedCalls(t *testing.T, s *server, id string) {
	const table = "[usertrap]" // the memory that patched calls jump to
	if maps := s.exec(id, "cat /proc/self/maps"); strings.Contains(maps, table) || !strings.Contains(maps, "cat") {
		t.Errorf("the calls of cat are patched, is runsc the one that `make runtimes` builds?\n%s", maps)
	}
	if maps := s.exec(id, `python3 -c 'import os; [os.getppid() for _ in range(1000)]; print(open("/proc/self/maps").read())'`); !strings.Contains(maps, table) {
		t.Errorf("a thousand calls of one instruction are not patched:\n%s", maps)
	}
}

// testRuntimes runs the same in both classes: limits that hold, and pause and resume, after which a
// sandbox of class runc has its files and no processes.
func testRuntimes(t *testing.T, s *server) {
	for class, kernel := range map[string]string{"gvisor": "gvisor", "runc": ""} {
		t.Run(class, func(t *testing.T) {
			s := s.in(t)
			s.apply(runtimeTemplate("small-"+class, class, "256Mi"))
			id, out := s.keep("small-"+class, "uname", "-r")
			if kernel != "" && !strings.Contains(out, kernel) {
				t.Errorf("the kernel calls itself %q", out)
			}
			var shown struct {
				CPUCount, MemoryMB int
			}
			s.read(&shown, "show", id)
			if shown.CPUCount != 1 || shown.MemoryMB != 256 {
				t.Errorf("show --json has %+v", shown)
			}
			s.exec(id, "echo kept > /tmp/kept; nohup sleep 9999 >/dev/null 2>&1 & echo $! > /tmp/pid")
			s.must("pause", id)
			if out, err := s.try("exec", id, "--", "true"); err == nil || !strings.Contains(out, "resume") {
				t.Errorf("exec in a paused sandbox = %v\n%s", err, out)
			}
			s.must("resume", id)
			running := map[string]string{"gvisor": "kept, and runs", "runc": "kept"}[class] // runc keeps files only
			if out := s.exec(id, "cat /tmp/kept; ps -p $(cat /tmp/pid) -o args= | grep -q '^sleep 9999' && echo ', and runs' || true"); strings.ReplaceAll(out, "\n", "") != running {
				t.Errorf("after pause and resume: %q, want %q", out, running)
			}
			testMemory(t, s, class, id)
			testPids(t, s, class)
			if class == "gvisor" {
				testPatchedCalls(t, s, id)
			}
		})
	}
}

// testPids verifies that fork fails with EAGAIN at the server's limit of processes and threads, and the sandbox
// keeps running.
func testPids(t *testing.T, s *server, class string) {
	t.Helper()
	s.apply(runtimeTemplate("pids-"+class, class, "1Gi"))
	id, _ := s.keep("pids-"+class, "true")
	var errno syscall.Errno
	var count int
	out := s.exec(id, "python3 -c '"+forkProgram+"'")
	if _, err := fmt.Sscan(out, &errno, &count); err != nil || errno != syscall.EAGAIN || count > pidsLimit || count < pidsLimit/4 {
		t.Errorf("%d processes were made, then %v (%v); want at most %d, then EAGAIN\n%s", count, errno, err, pidsLimit, out)
	}
	if out := s.exec(id, "echo alive"); out != "alive" {
		t.Errorf("afterwards it returned %q", out)
	}
}

// hogs take more memory than a sandbox has: one process, several that together do, and a program in C.
var hogs = []string{
	"python3 -c 'bytearray(1 << 30)'",
	`python3 -c "import os
for _ in range(6):
    if os.fork() == 0:
        b = bytearray(100 << 20)
        os._exit(0)
assert any([os.wait()[1] for _ in range(6)])"; exit 137`,
	"head -c 1G /dev/zero | tail; exit ${PIPESTATUS[1]}",
}

// testMemory verifies that a program that takes too much memory is killed, and that its sandbox lives on. Where the host
// has cgroups of version 2, a gVisor sandbox ends with it.
func testMemory(t *testing.T, s *server, class, id string) {
	t.Helper()
	if _, err := os.Stat("/sys/fs/cgroup/memory/memory.oom_control"); err != nil && class == "gvisor" {
		t.Skip("SKIPPED: the node cannot take the memory limit over with cgroup version 2")
	}
	for _, hog := range hogs {
		out, err := s.try("exec", id, "--", "bash", "-c", hog)
		if code := exitCode(err); code != 137 && code != 139 && !strings.Contains(out, "MemoryError") {
			t.Errorf("exit code %d of %s, want 137\n%s", code, hog, out)
		}
		if out := s.exec(id, "echo alive"); out != "alive" {
			t.Fatalf("the sandbox did not outlive %s: %q", hog, out)
		}
	}
	if class == "gvisor" {
		eventually.True(t, "an Event tells it", func() bool { return strings.Contains(s.mustKubectl("", "get", "events"), "OOMKilled") })
		if out := s.must("logs", id); !strings.Contains(out, "out of memory: process killed") {
			t.Errorf("the logs do not tell it:\n%s", out)
		}
	}
}

const serviceTemplate = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: service}
spec:
  podTemplate:
    spec:
      hostname: inner
      hostAliases: [{ip: 10.1.2.3, hostnames: [db.test, db]}]
      containers:
      - name: main
        image: ` + baseImage + `
        command: [sh, -c]
        args:
        - |
          echo "runs as $(id -u):$(id -g) in $(pwd) with $BOTH"; echo "to stderr" >&2
          date +%s%N >> /data/starts
          python3 -m http.server $(PORT) --directory /data &
          until test -f /scratch/stop; do sleep 0.1; done
          exit 3
        workingDir: /srv/app
        securityContext: {runAsUser: 1234, runAsGroup: 1235}
        env:
        - {name: GREETING, value: hello}
        - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: BOTH, value: "$(GREETING) $(POD)"}
        - {name: PORT, value: "8080"}
        ports: [{name: web, containerPort: 8080}]
        readinessProbe: {httpGet: {path: /ready, port: web}, periodSeconds: 1, failureThreshold: 1}
        volumeMounts: [{name: scratch, mountPath: /scratch}, {name: data, mountPath: /data}, {name: memory, mountPath: /memory}]
      volumes: [{name: scratch, emptyDir: {}}, {name: memory, emptyDir: {medium: Memory, sizeLimit: 16Mi}}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
`

// sandboxOf makes a Sandbox object of a template's pod.
func sandboxOf(name, template, more string) string {
	head, pod, _ := strings.Cut(template, "spec:\n")
	_ = head
	return "apiVersion: agents.x-k8s.io/v1beta1\nkind: Sandbox\nmetadata: {name: " + name + "}\nspec:\n" + pod + more
}

// idOf is a sandbox's ID by its object's name.
func (s *server) idOf(name string) (id string) {
	s.t.Helper()
	eventually.NoError(s.t, "sandbox "+name+" has an ID", func() error {
		out, err := s.kubectl("", "get", "sandbox", name, "-o", "jsonpath={.status.barchan.id}")
		if id = strings.TrimSpace(out); err != nil || len(id) != 20 {
			return fmt.Errorf("%w %q", err, out)
		}
		return nil
	})
	return id
}

// testService follows a template with a program of its own through its life.
func testService(t *testing.T, s *server) {
	s.mustKubectl(sandboxOf("service", serviceTemplate, ""), "apply", "-f", "-")
	id := s.idOf("service")
	eventually.NoError(t, "the probe fails before the program is ready", func() error {
		if got := s.condition("service", "Ready"); !strings.Contains(got, "DependenciesNotReady") || !strings.Contains(got, "httpGet") {
			return fmt.Errorf("condition Ready is %q", got)
		}
		return nil
	})
	s.exec(id, "touch /data/ready")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/service", patience)

	lines := followLogs(t, s, id)
	lines.until("runs as 1234:1235 in /srv/app with hello service")
	lines.until("to stderr")
	inside := s.exec(id, "id -u; pwd; hostname; getent hosts db.test; stat -f -c %T /memory; touch /scratch/x /memory/y && echo written")
	for _, want := range []string{"1234", "/srv/app", "inner", "10.1.2.3", "tmpfs", "written"} {
		if !strings.Contains(inside, want) {
			t.Errorf("inside there is no %q:\n%s", want, inside)
		}
	}
	if out := s.exec(id, "dd if=/dev/zero of=/memory/big bs=1M count=32 2>&1 || true"); !strings.Contains(out, "No space left") {
		t.Errorf("a volume of 16 MiB takes 32: %s", out)
	}
	s.untilServed(id, "/ready")

	s.exec(id, "rm /data/ready")
	s.mustKubectl("", "wait", "--for=condition=Ready=false", "sandbox/service", patience)
	s.exec(id, "touch /data/ready")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/service", patience)

	s.exec(id, "touch /scratch/stop")
	eventually.NoError(t, "the end of the program is seen", func() error {
		out, err := s.kubectl("", "get", "sandbox", "service", "-o", "jsonpath={.status.barchan.exitCode}")
		if err != nil || out != "3" {
			return fmt.Errorf("exitCode %q %w", out, err)
		}
		return nil
	})
	lines.until("exit status 3")
	if out := s.exec(id, "echo alive"); out != "alive" { // as a computer does, the sandbox keeps running
		t.Errorf("after its program ended: %q", out)
	}
	described := ""
	eventually.NoError(t, "kubectl describe lists the events", func() error {
		described = s.mustKubectl("", "describe", "sandbox", "service")
		for _, want := range []string{"Started", "Unhealthy", "EntrypointEnded"} {
			if !strings.Contains(described[max(0, strings.LastIndex(described, "Events:")):], want) {
				return fmt.Errorf("there is no event %s:\n%s", want, described)
			}
		}
		return nil
	})
	s.must("kill", id)
	lines.end()
}

// testRestartPolicy verifies that a program that ends is restarted with its volumes.
func testRestartPolicy(t *testing.T, s *server) {
	manifest := strings.Replace(sandboxOf("again", serviceTemplate, ""), "hostname: inner", "hostname: inner\n      restartPolicy: Always", 1)
	s.mustKubectl(manifest, "apply", "-f", "-")
	id := s.idOf("again")
	eventually.NoError(t, "it runs", func() error {
		if out, err := s.try("exec", id, "--", "sh", "-c", "touch /data/ready; cat /data/starts"); err != nil || strings.Count(out, "\n") != 1 {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/again", patience)
	before := s.mustKubectl("", "get", "sandbox", "again", "-o", "jsonpath={.status.podIPs}")
	s.exec(id, "echo kept > /data/kept; touch /scratch/stop")
	eventually.NoError(t, "it has begun again", func() error {
		out, err := s.try("exec", id, "--", "sh", "-c", `cat /data/kept; n=$(wc -l < /data/starts); echo $n; [ $n = 1 ] || rm -f /scratch/stop`) // not before it was seen
		if fields := strings.Fields(out); err != nil || len(fields) != 2 || fields[0] != "kept" || fields[1] == "1" {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/again", patience)
	if after := s.mustKubectl("", "get", "sandbox", "again", "-o", "jsonpath={.status.podIPs}"); after != before {
		t.Errorf("after its restart it has the address %s, had %s", after, before)
	}
	s.mustKubectl("", "delete", "sandbox", "again", patience)

	never := strings.Replace(sandboxOf("once", serviceTemplate, ""), "hostname: inner", "hostname: inner\n      restartPolicy: Never", 1)
	never = strings.Replace(never, "          until test", "          touch /scratch/stop\n          until test", 1)
	s.mustKubectl(never, "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Finished", "sandbox/once", patience)
	if got := s.condition("once", "Finished"); !strings.HasPrefix(got, "True PodFailed") || !strings.Contains(got, "code 3") {
		t.Errorf("condition Finished is %q", got)
	}
	s.mustKubectl("", "delete", "sandbox", "once", patience)
}

// logTail is `barchan logs -f`.
type logTail struct {
	t     *testing.T
	lines chan string
	done  chan error
	seen  []string
}

func followLogs(t *testing.T, s *server, id string) *logTail {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*startTime) // for all that is waited for until its end
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, programs.barchan, "logs", "-f", id)
	cmd.Env = s.env
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	l := &logTail{t: t, lines: make(chan string, 1000), done: make(chan error, 1)}
	go func() {
		for sc := bufio.NewScanner(out); sc.Scan(); {
			l.lines <- sc.Text()
		}
		close(l.lines)
		l.done <- cmd.Wait()
	}()
	return l
}

// until waits for a line with a text.
func (l *logTail) until(text string) {
	l.t.Helper()
	for _, line := range l.seen {
		if strings.Contains(line, text) {
			return
		}
	}
	for line := range l.lines {
		l.seen = append(l.seen, line)
		if strings.Contains(line, text) {
			return
		}
	}
	l.t.Errorf("the log ended without %q:\n%s", text, strings.Join(l.seen, "\n"))
}

// end waits for the command to end.
func (l *logTail) end() {
	l.t.Helper()
	for line := range l.lines {
		l.seen = append(l.seen, line)
	}
	if err := <-l.done; err != nil {
		l.t.Errorf("logs -f ended with %v", err)
	}
}

// testRefusals verifies that what one machine cannot provide is rejected by the field's name.
func testRefusals(t *testing.T, s *server) {
	for field, change := range map[string][2]string{
		"spec.podTemplate.spec.hostNetwork":                               {"hostname: inner", "hostNetwork: true"},
		"spec.podTemplate.spec.runtimeClassName":                          {"hostname: inner", "runtimeClassName: kata"},
		"spec.podTemplate.spec.containers[0].securityContext.privileged":  {"runAsUser: 1234", "privileged: true"},
		"spec.podTemplate.spec.containers[0].resources.limits[memory]":    {"workingDir: /srv/app", "resources: {limits: {memory: 1Mi}}"},
		"spec.podTemplate.spec.volumes[0].hostPath":                       {"name: scratch, emptyDir: {}", "name: scratch, hostPath: {path: /etc}"},
		"spec.podTemplate.spec.containers[0].readinessProbe.httpGet.port": {"port: web", "port: nobody"},
		"spec.podTemplate.spec.containers[0].env[0].valueFrom":            {"{name: GREETING, value: hello}", "{name: GREETING, valueFrom: {fileKeyRef: {volumeName: a, path: b, key: c}}}"},
		"spec.podTemplate.spec.containers[0].volumeMounts[0].mountPath":   {"mountPath: /scratch", "mountPath: /proc"},
		"spec.podTemplate.spec.nonsense":                                  {"hostname: inner", "nonsense: 1"},
		"containerPort: expected numeric":                                 {"containerPort: 8080", "containerPort: many"},
	} {
		manifest := strings.Replace(serviceTemplate, change[0], change[1], 1)
		out, err := s.tryIn(manifest, "apply", "-f", "-")
		if err == nil || !strings.Contains(out, field) {
			t.Errorf("apply with %s = %v, want %s named\n%s", change[1], err, field, out)
		}
	}
	if out, err := s.tryIn(imageTemplate("mounts", baseImage, "\n        volumeMounts: [{name: nowhere, mountPath: /x}]"), "apply", "-f", "-"); err == nil || !strings.Contains(out, "volumeMounts[0].name") {
		t.Errorf("a mount of no volume = %v\n%s", err, out)
	}
}
