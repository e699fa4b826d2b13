package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// canary is a program that must continue after its sandbox was stored on disk, and in a fork.
type canary struct {
	name string
	// files are copied in: where they are here, and where they shall be.
	files map[string]string
	// start is a shell line; what it leaves running must serve the port of the variable PORT.
	start string
	// grows requires answers "WORD NUMBER" with the same word, and a greater number each time. Else they
	// are the same each time.
	grows bool
}

// TestCanaries has programs of many kinds sleep on disk twice, since what comes back from disk has
// other ways to fail than what never was there, and then be forked.
func TestCanaries(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", "1ms")
	s.start()
	s.must("image", "build", "base")
	s.apply(runtimeTemplate("roomy", "gvisor", "1536Mi"))
	for _, c := range canaries(t) {
		t.Run(c.name, func(t *testing.T) { s.in(t).keeps(c) })
	}
	eventually.NoError(t, "nothing is left", s.onlyLive)
}

// canaries are the programs: some in languages that people use, and one for each thing that a kernel
// keeps for its processes.
func canaries(t *testing.T) []canary {
	t.Helper()
	program := canaryProgram(t)
	const inside = "/home/user/canary"
	all := []canary{
		{name: "python http server", grows: true, files: map[string]string{}, start: "python3 -c '" + witness + "'"},
		{name: "python threads", grows: true, files: map[string]string{"testdata/canary/threads.py": "/home/user/threads.py"}, start: "python3 /home/user/threads.py"},
		{name: "sqlite", grows: true, files: map[string]string{"testdata/canary/sqlite.py": "/home/user/sqlite.py"}, start: "python3 /home/user/sqlite.py"},
		{name: "shell loop", grows: true, files: map[string]string{}, start: shellLoop},
	}
	if node := nodeProgram(t); node != nil {
		node["testdata/canary/server.js"] = "/home/user/server.js"
		all = append(all, canary{name: "node", grows: true, files: node, start: "LD_LIBRARY_PATH=/home/user/lib /home/user/lib/node /home/user/server.js"})
	}
	kinds, err := exec.CommandContext(t.Context(), program, "kinds").Output()
	if err != nil {
		t.Fatal(err)
	}
	for kind := range strings.FieldsSeq(string(kinds)) {
		own := inside + "-" + kind // one deletes its own
		all = append(all, canary{name: "go " + kind, files: map[string]string{program: inside}, start: "cp " + inside + " " + own + "; exec " + own + " " + kind})
	}
	return all
}

// shellLoop counts, and a server beside it shows the count.
const shellLoop = `mkdir -p /tmp/www; cd /tmp/www
(i=0; while :; do i=$((i+1)); echo -n $$ $i > new; mv new index.html; sleep 0.1; done) &
exec python3 -m http.server $PORT`

// canaryProgram builds the program of testdata/canary.
func canaryProgram(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "canary")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, "./testdata/canary")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build canary: %v\n%s", err, out)
	}
	return path
}

// nodeProgram is this machine's node with the libraries that the base image may lack, since the
// image has none; nil without one.
func nodeProgram(t *testing.T) map[string]string {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("node is needed: apt-get install nodejs")
		}
		t.Log("SKIPPED: node is not installed")
		return nil
	}
	files := map[string]string{}
	out, err := exec.CommandContext(t.Context(), "ldd", node).Output()
	if err != nil {
		t.Fatalf("ldd %s: %v", node, err)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 2 && filepath.IsAbs(f[2]) && !strings.Contains(f[0], "libc.so") && !strings.Contains(f[0], "libpthread") && !strings.Contains(f[0], "libdl") && !strings.Contains(f[0], "libm.so") {
			files[f[2]] = "/home/user/lib/" + f[0]
		}
	}
	files[node] = "/home/user/lib/node"
	return files
}

// keeps verifies that a canary survives two stores on disk, and then a fork, as do its source's processes.
func (s *server) keeps(c canary) {
	s.t.Helper()
	id, before := s.hatch(c)
	for _, when := range []string{"after the first sleep", "after the second sleep"} {
		s.must("pause", id)
		s.onDisk(id)
		s.must("resume", id)
		before = s.checkCanary(c, id, witnessPort, before, when)
	}
	fork := s.mustFork(id, 1, nil)[0].SandboxID
	s.checkCanary(c, fork, witnessPort, before, "in a fork")
	s.checkCanary(c, id, witnessPort, before, "after it was forked")
	s.must("kill", id, fork)
}

// hatch starts a canary in a sandbox of its own.
func (s *server) hatch(c canary) (id, answer string) {
	s.t.Helper()
	id = s.canarySandbox(c)
	return id, s.startCanary(c, id, witnessPort)
}

// canarySandbox makes a sandbox with the files of canaries.
func (s *server) canarySandbox(all ...canary) (id string) {
	s.t.Helper()
	id, _ = s.keep("roomy", "mkdir", "-p", "/home/user/lib")
	files := map[string]string{}
	for _, c := range all {
		maps.Copy(files, c.files)
	}
	for from, to := range files {
		s.must("cp", from, id+":"+to)
	}
	s.exec(id, "chmod -R u+x /home/user")
	return id
}

// startCanary starts a canary in a sandbox that has its files, and has it answer twice, so that what fails without a sleep is not taken for what a sleep did.
func (s *server) startCanary(c canary, id string, port int) (answer string) {
	s.t.Helper()
	script := fmt.Sprintf("/home/user/start-%d", port)
	s.exec(id, fmt.Sprintf("cat >%[1]s <<'END'\nexport PORT=%[2]d\n%[3]s\nEND\nnohup setsid bash %[1]s >%[4]s 2>&1 &", script, port, c.start, canaryLog(port)))
	eventually.NoError(s.t, c.name+" answers", func() (err error) {
		answer, err = s.visitCanary(id, port)
		return err
	})
	return s.checkCanary(c, id, port, answer, "before any sleep")
}

// canaryLog is where a canary's output is, in its sandbox.
func canaryLog(port int) string { return fmt.Sprintf("/tmp/canary-%d.log", port) }

// checkCanary queries a canary once and compares its state.
func (s *server) checkCanary(c canary, id string, port int, before, when string) (answer string) {
	s.t.Helper()
	answer, err := s.askCanary(c, id, port, before)
	if err != nil {
		s.t.Fatalf("%s: %v\n%s", when, err, s.exec(id, "cat "+canaryLog(port)))
	}
	return answer
}

// askCanary has a canary answer, compares that with an answer before, and waits until one that counts goes on. It may be called by any
// goroutine.
func (s *server) askCanary(c canary, id string, port int, before string) (answer string, err error) {
	if answer, err = s.visitCanary(id, port); err != nil {
		return "", err
	}
	if err := c.compare(before, answer); err != nil || !c.grows {
		return answer, err
	}
	return answer, within("it counts", func() error {
		later, err := s.visitCanary(id, port)
		if err == nil && later == answer {
			err = errors.New(later)
		}
		return err
	})
}

func (c canary) compare(before, after string) error {
	if !c.grows {
		if after != before {
			return fmt.Errorf("it returned %q, want %q", after, before)
		}
		return nil
	}
	nonce, number, _ := strings.Cut(before, " ")
	nonceNow, numberNow, _ := strings.Cut(after, " ")
	was, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	is, err := strconv.Atoi(numberNow)
	if err != nil || nonceNow != nonce || is < was {
		return fmt.Errorf("it returned %q, want %q", after, before)
	}
	return nil
}

// onDisk waits until the memory of a sandbox is on disk, and nothing of it runs.
func (s *server) onDisk(id string) {
	s.t.Helper()
	eventually.NoError(s.t, "the memory of "+id+" is on disk", func() error {
		out, err := s.kubectl("", "get", "sandboxes", "-A", "-o",
			`jsonpath={range .items[?(@.status.barchan.id=="`+id+`")]}{.status.barchan.memory}{end}`)
		if err == nil && out != string(agents.MemoryOnDisk) {
			err = fmt.Errorf("it is in %s: %s", out, s.suspended(id))
		}
		return err
	})
	eventually.NoError(s.t, "nothing of "+id+" runs", func() error {
		if n := s.processesOf(id); n > 0 {
			return fmt.Errorf("%d processes", n)
		}
		return nil
	})
}

// processesOf counts the processes in the cgroup of a sandbox, in any hierarchy. It may be called by any goroutine.
func (s *server) processesOf(id string) (n int) {
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory"} {
		b, _ := os.ReadFile(filepath.Join(root, s.value("BARCHAN_CGROUP_PARENT"), id, "cgroup.procs")) // there is one hierarchy, and none once it has ended
		n += bytes.Count(b, []byte("\n"))
	}
	return n
}
