package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/creack/pty"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const buildID = "5e8f8d2c-0000-4000-8000-000000000001"

// builds is the API's part for template builds. Its only build logs each step, and ends as it is told.
type builds struct {
	t *testing.T

	mu        sync.Mutex // one request at a time; tests read the rest between them
	requested template.Options
	started   *template.Spec
	uploads   map[string][]byte // by hash
	log       []template.LogEntry
	polls     int

	cached int  // that many steps first
	fails  int  // the number of the step; zero: none
	stays  bool // it does not end
	// canceled: it was asked for, and not refused, which refuses has it do.
	canceled, refuses bool
	gone              int // that many reads of the status fail
	reason            *template.Reason
}

func (b *builds) serve(w http.ResponseWriter, r *http.Request) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	hash, upload := strings.CutPrefix(r.URL.Path, "/templates/uploads/")
	switch {
	case upload:
		content, err := io.ReadAll(r.Body)
		if err != nil || r.Method != http.MethodPut || r.ContentLength != int64(len(content)) || r.Header.Get("X-Api-Key") != "" || r.Header.Get("X-Signed") != "yes" {
			b.t.Errorf("upload: %v, %d of %d bytes, %v", err, len(content), r.ContentLength, r.Header)
		}
		b.uploads[hash] = content
	case r.Header.Get("X-Api-Key") != testKey:
		return false
	case r.Method+" "+r.URL.Path == "POST /v3/templates":
		_ = json.NewDecoder(r.Body).Decode(&b.requested)
		if b.requested.Name == "Bad" {
			refuse(w, http.StatusBadRequest, "name: is bad")
			return true
		}
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprintf(w, `{"templateID":"t1","buildID":%q}`, buildID)
	case strings.HasPrefix(r.URL.Path, "/templates/t1/files/"):
		hash := strings.TrimPrefix(r.URL.Path, "/templates/t1/files/")
		_, present := b.uploads[hash]
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(template.Files{
			Present: present, URL: "http://" + r.Host + "/templates/uploads/" + hash, Headers: map[string]string{"X-Signed": "yes", "content-length": "1"},
		})
	case r.Method+" "+r.URL.Path == "POST /v2/templates/t1/builds/"+buildID:
		b.start(r)
		w.WriteHeader(http.StatusAccepted)
	case r.Method+" "+r.URL.Path == "DELETE /templates/t1/builds/"+buildID:
		if b.refuses {
			refuse(w, http.StatusConflict, "the build has ended")
			return true
		}
		b.canceled = true
		w.WriteHeader(http.StatusNoContent)
	case r.URL.Path == "/templates/t1/builds/"+buildID+"/status":
		b.status(w, r)
	default:
		return false
	}
	return true
}

func (b *builds) start(r *http.Request) {
	b.started, b.log = &template.Spec{}, nil
	if err := json.NewDecoder(r.Body).Decode(b.started); err != nil {
		b.t.Error(err)
	}
	say := func(step, level, message string) {
		b.log = append(b.log, template.LogEntry{Step: step, Level: level, Message: message})
	}
	say("base", "info", "from image "+b.started.FromImage)
	for i, step := range b.started.Steps {
		n, text := strconv.Itoa(i+1), step.Type+" "+strings.Join(step.Args, " ")
		if i < b.cached {
			say(n, "info", "CACHED "+text)
			continue
		}
		say(n, "info", text)
		if step.Type == "RUN" {
			say(n, "info", "one\r two\tof \x1b[1mthem")
			say(n, "warn", "careful")
			say(n, "debug", "hidden")
		}
		if i+1 == b.fails {
			b.reason = &template.Reason{Step: n, Message: "failed to run command '" + step.Args[0] + "': command failed: exit status 3"}
			say(n, "error", b.reason.Message)
			return
		}
	}
}

// status shows at most 3 entries a call, so that there are several.
func (b *builds) status(w http.ResponseWriter, r *http.Request) {
	b.polls++
	if b.gone--; b.gone >= 0 {
		refuse(w, http.StatusServiceUnavailable, "starting")
		return
	}
	offset, err := strconv.Atoi(r.URL.Query().Get("logsOffset"))
	if err != nil || b.started == nil || len(b.started.Steps) == 0 {
		b.t.Errorf("status: %s, %v", r.URL, err)
	}
	entries := b.log[min(offset, len(b.log)):min(offset+3, len(b.log))]
	s := template.Status{Status: "building", LogEntries: entries}
	switch {
	case b.stays:
	case b.reason != nil:
		s.Status, s.Reason = template.StatusError, b.reason
	default:
		s.Status = template.StatusReady
	}
	_ = json.NewEncoder(w).Encode(s)
}

// newBuilds returns a server with builds, and a directory with files.
func newBuilds(t *testing.T, files map[string]string) (*server, *builds, string) {
	t.Helper()
	s := newServer(t, nil)
	s.builds = &builds{t: t, uploads: map[string][]byte{}}
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", t.TempDir()) // not that of this machine's user
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return s, s.builds, dir
}

var webFiles = map[string]string{
	"Dockerfile":    "ARG V\nFROM python:$V\nLABEL a=b\nCOPY app.py secret* /app/\nRUN echo it\nUSER app\nCMD [\"python\", \"/app/app.py\"]\nHEALTHCHECK CMD true\n",
	"app.py":        "print(1)\n",
	"secret":        "no",
	".dockerignore": "secret\n",
	"other":         "FROM x\n",
}

func TestBuild(t *testing.T) {
	s, b, dir := newBuilds(t, webFiles)
	t.Setenv("V", "3")
	got := s.run("", "build", "-t", "web", "--build-arg", "V", "--cpus", "2", "--memory", "1Gi", "--no-cache", dir)
	got.want(t, 0, "t1\n", "note: "+dir+"/Dockerfile:3: LABEL has no effect\nfrom image python:3\n[1/6] USER root\n[2/6] WORKDIR /\n[3/6] COPY app.py secret* /app/\n"+
		"[4/6] RUN echo it\n   two    of \\x1b[1mthem\n  careful\n[5/6] USER app\n[6/6] WORKDIR /home/user\n")
	if got.stdout != "t1\n" || strings.Contains(got.stderr, "hidden") {
		t.Errorf("%+v", got)
	}
	if b.requested != (template.Options{Name: "web", CPUCount: 2, MemoryMB: 1024}) {
		t.Errorf("requested %+v", b.requested)
	}
	start := b.started
	if start.FromImage != "python:3" || start.FromTemplate != "" || !start.Force || start.StartCmd != "python /app/app.py" || start.ReadyCmd != "/bin/sh -c true" {
		t.Errorf("started %+v", start)
	}
	if names := b.uploaded(t, start.Steps[2].FilesHash); names != "app.py" || len(b.uploads) != 1 {
		t.Errorf("uploaded %s and others, %d", names, len(b.uploads))
	}
}

// TestBuildStages sends stages, mounts and secrets, and no secret by any other way.
func TestBuildStages(t *testing.T) {
	s, b, dir := newBuilds(t, map[string]string{"app.py": "print(1)\n", "token": "s3cr3t"})
	t.Setenv("KEY", "of the environment")
	file := "FROM a AS one\nRUN x\nFROM b\nRUN --mount=type=secret,id=t,required --mount=source=app.py,target=/m y\nCOPY --from=one /x /y\n"
	args := []string{"build", "-t", "web", "-f", "-", "--secret", "id=t,src=" + filepath.Join(dir, "token"), "--secret", "id=KEY", "--secret", "type=env,id=k,env=KEY", dir}
	got := s.run(file, args...)
	got.want(t, 0, "t1\n", "[4/6] COPY --from=one /x /y\n")
	start := b.started
	if len(start.Stages) != 1 || start.Stages[0].Name != "one" || start.Stages[0].FromImage != "a" || len(start.Stages[0].Steps) != 3 || start.Steps[3].From.Stage != "one" {
		t.Errorf("started %+v", start)
	}
	if mounts := start.Steps[2].Mounts; len(mounts) != 2 || b.uploaded(t, mounts[1].FilesHash) != "app.py" || len(b.uploads) != 1 {
		t.Errorf("mounts %+v, uploaded %d", mounts, len(b.uploads))
	}
	if text := fmt.Sprintf("%s", start.Secrets); text != "map[KEY:of the environment k:of the environment t:s3cr3t]" {
		t.Errorf("secrets %s", text)
	}
	if strings.Contains(got.stdout+got.stderr, "s3cr3t") {
		t.Errorf("a secret is printed: %+v", got)
	}
	b.reason = &template.Reason{Step: "one/3", Message: "failed to run command '" + start.Stages[0].Steps[2].Args[0] + "': command failed: exit status 3"}
	s.run(file, args...).want(t, 1, "", "barchan: Dockerfile:2: step one 3 of 3, RUN x: command failed: exit status 3\n")
	b.reason = &template.Reason{Step: "one/base", Message: "no such image"}
	s.run(file, args...).want(t, 1, "", "barchan: Dockerfile:1: FROM a: no such image\n")

	b.reason = &template.Reason{Step: "image/base", Message: "no such image"}
	s.run("FROM b\nRUN x\nCOPY --from=uv:1 /uv /bin/\n", "build", "-t", "web", "-f", "-", dir).want(t, 1, "", "barchan: Dockerfile:3: from=uv:1: no such image\n")

	b.started = nil
	for secret, want := range map[string]string{
		"t":                  `--secret: "t" is none of id, src and env`,
		"src=x":              `--secret: "src=x" is not id=ID,src=FILE or id=ID,env=NAME`,
		"id=a,src=b,env=c":   `is not id=ID,src=FILE or id=ID,env=NAME`,
		"id=a,env=NONE_HERE": `--secret: id "a": the environment has no variable NONE_HERE`,
		"id=a,src=/none":     `--secret: open /none: no such file or directory`,
	} {
		s.run(file, "build", "-t", "web", "-f", "-", "--secret", secret, dir).want(t, 2, "", want)
	}
	s.run(file, "build", "-t", "web", "-f", "-", dir).want(t, 1, "", `barchan: Dockerfile:4: RUN: --mount=type=secret: it requires secret "t"; give it by --secret id=t,src=FILE`)
	if b.started != nil {
		t.Error("a build is started without its secret")
	}
}

// TestBuildAgain takes kept results and files, from a server that is being restarted.
func TestBuildAgain(t *testing.T) {
	s, b, dir := newBuilds(t, webFiles)
	s.run("", "build", "-t", "web", "--build-arg", "V=3", dir).want(t, 0, "t1\n", "")
	b.uploads[b.started.Steps[2].FilesHash] = nil // it is there, and not sent again
	b.cached, b.gone = 4, 2
	s.run("FROM scratch\nCOPY app.py secret* /app/\nRUN x\n", "build", "-t", "web", "-f", "-", "--from-template", "base", "--start-command", "a b", "--ready-command", "c", dir).
		want(t, 0, "t1\n", "[3/6] COPY app.py secret* /app/ (cached)\n[4/6] RUN x (cached)\n[5/6] USER user\n")
	start := b.started
	if start.FromImage != "" || start.FromTemplate != "base" || start.Force || start.StartCmd != "a b" || start.ReadyCmd != "c" {
		t.Errorf("started %+v", start)
	}
	if b.uploads[start.Steps[2].FilesHash] != nil {
		t.Error("files are sent although they are there")
	}
}

func TestBuildJSON(t *testing.T) {
	s, b, dir := newBuilds(t, webFiles)
	b.cached = 4
	var out struct {
		TemplateID, BuildID, Status, Name string
		Steps, CachedSteps                int
	}
	got := s.run("", "build", "-t", "web", "-f", filepath.Join(dir, "other"), "--json", dir)
	if err := json.Unmarshal([]byte(got.stdout), &out); err != nil || got.code != 0 || out.TemplateID != "t1" || out.BuildID != buildID || out.Status != "ready" || out.Steps != 4 || out.CachedSteps != 4 || out.Name != "web" {
		t.Errorf("%+v: %+v, %v", got, out, err)
	}
}

// uploaded returns the names in an archive.
func (b *builds) uploaded(t *testing.T, hash string) string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader(b.uploads[hash]))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return strings.Join(names, " ")
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}

func TestBuildFails(t *testing.T) {
	s, b, dir := newBuilds(t, webFiles)
	args := []string{"build", "-t", "web", "--build-arg", "V=3", dir}
	b.fails = 4
	got := s.run("", args...)
	got.want(t, 1, "", "  careful\nbarchan: "+dir+"/Dockerfile:5: step 4 of 6, RUN echo it: command failed: exit status 3\n")
	if strings.Count(got.stderr, "exit status 3") != 1 {
		t.Errorf("the error is there twice: %s", got.stderr)
	}
	var out struct {
		Status  string
		Failure struct {
			Step, Message, Text string
			Line                int
		}
	}
	got = s.run("", append(args, "--json")...)
	if err := json.Unmarshal([]byte(got.stdout), &out); err != nil || got.code != 1 || out.Status != "error" || out.Failure.Step != "4" || out.Failure.Line != 5 ||
		out.Failure.Text != "RUN echo it" || out.Failure.Message != "command failed: exit status 3" {
		t.Errorf("%+v: %+v, %v", got, out, err)
	}
	b.fails, b.reason = 0, &template.Reason{Step: "base", Message: "no such image"}
	s.run("", args...).want(t, 1, "", "barchan: "+dir+"/Dockerfile:2: FROM python:3: no such image\n")
	b.reason = &template.Reason{Step: "finalize", Message: "it ended"}
	s.run("", args...).want(t, 1, "", "barchan: "+dir+"/Dockerfile: start of python /app/app.py: it ended\n")

	b.started = nil
	s.run("FROM x\nCOPY --from=1 b c\nCOPY none /\n", "build", "-t", "web", "-f", "-", dir).
		want(t, 1, "", "barchan: Dockerfile:2: COPY --from=1: there is no such stage\nDockerfile:3: COPY: the context has no \"none\"\n")
	s.run("", "build", "-t", "Bad", "--build-arg", "V=3", dir).want(t, 1, "", "barchan: name: is bad\n")
	s.run("", "build", dir).want(t, 2, "", "barchan: -t is missing: the name of the template\nusage: barchan build [DIR] [flags]\n")
	s.run("", "build", "-t", "x", "--memory", "512m", dir).want(t, 2, "", `--memory: "512m" is not a size of at least 1Mi, such as 512Mi`)
	s.run("", "build", "-t", "x", "--build-arg", "=1", dir).want(t, 2, "", `--build-arg: "=1" is not NAME=VALUE`)
	s.run("", "build", "-t", "x", "-f", filepath.Join(dir, "none"), dir).want(t, 1, "", "barchan: read the Dockerfile; -f names another: open ")
	s.run("", "build", "-t", "x", filepath.Join(dir, "none")).want(t, 1, "", "barchan: open the directory to build: ")
	if b.started != nil {
		t.Error("a build is started although its Dockerfile is wrong")
	}
	s.builds = nil
	s.run("", args...).want(t, 1, "", "barchan: ")
}

// TestBuildInterrupted sends SIGINT to a build, and to one that the server does not cancel.
func TestBuildInterrupted(t *testing.T) {
	for name, c := range map[string]struct {
		refuses bool
		want    []string
	}{
		"canceled": {false, []string{"build " + buildID + " is canceled\n"}},
		"refused":  {true, []string{"build " + buildID + " may go on (the build has ended", "`kubectl delete templatebuild " + buildID + "` cancels it\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, b, dir := newBuilds(t, webFiles)
			b.stays, b.refuses = true, c.refuses
			p := s.program()
			p.start("build", "-t", "web", "--build-arg", "V=3", dir)
			eventually.True(t, "the build is followed", func() bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				return b.polls > 3
			})
			if err := p.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			_ = p.Wait() // its code is checked
			if got := p.ProcessState.ExitCode(); got != 130 {
				t.Errorf("exit code %d", got)
			}
			for _, want := range c.want {
				if !strings.Contains(p.talk.String(), want) {
					t.Errorf("it says %s, want %s", p.talk.String(), want)
				}
			}
			if b.canceled == c.refuses {
				t.Errorf("the server has canceled it: %v", b.canceled)
			}
		})
	}
}

// TestBuildOnTerminal has colours, and no line of a progress bar that stays.
func TestBuildOnTerminal(t *testing.T) {
	s, _, dir := newBuilds(t, webFiles)
	master, terminal, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = master.Close() }()
	var out bytes.Buffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(&out, master) // ends with EIO
	}()
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	code := Run(t.Context(), []string{"--data-dir", s.dir, "build", "-t", "web", "--build-arg", "V=3", dir}, nil, io.Discard, terminal, app.Deps{})
	_ = terminal.Close()
	<-read
	if code != 0 || !strings.Contains(out.String(), "\x1b[32m[4/6] RUN echo it\x1b[0m") || !strings.Contains(out.String(), "\x1b[33m  careful\x1b[0m") ||
		!strings.Contains(out.String(), "COPY app.py secret* /app/\r\n") {
		t.Errorf("%d: %q", code, out.String())
	}
}

func TestBuildCredentials(t *testing.T) { //nolint:gocyclo // one story
	s, b, dir := newBuilds(t, map[string]string{"Dockerfile": "FROM r.test:5000/tools:1 AS tools\nRUN it\nFROM debian AS public\nRUN it\nFROM r.test:5000/app\nCOPY --from=tools /a /a\nCOPY --from=public /b /b\n"})
	config := t.TempDir()
	write := func(text string) {
		if err := os.WriteFile(filepath.Join(config, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"auths":{"r.test:5000":{"auth":"bWU6c2VzYW1l"},"other.test":{"auth":"eDp5"}}}`) // me:sesame
	t.Setenv("DOCKER_CONFIG", config)
	got := s.run("", "build", "-t", "web", dir)
	start := b.started
	want := template.Registry{Type: "registry", Username: "me", Password: "sesame"}
	if got.code != 0 || start.Registry == nil || *start.Registry != want || len(start.Stages) != 2 || start.Stages[0].Registry == nil || *start.Stages[0].Registry != want || start.Stages[1].Registry != nil {
		t.Errorf("%+v, started %+v", got, start)
	}
	if !strings.Contains(got.stderr, "note: images of r.test:5000 are pulled with the credentials of Docker's configuration\n") || strings.Contains(got.stderr+got.stdout, "sesame") {
		t.Errorf("printed %q", got.stderr)
	}
	if s.run("", "build", "-t", "web", "--registry-auth", "none", dir); b.started.Registry != nil || b.started.Stages[0].Registry != nil {
		t.Errorf("none: %+v", b.started)
	}
	write(`{"auths":{"r.test:5000":{"identitytoken":"sesame"}}}`)
	if got := s.run("", "build", "-t", "web", dir); got.code != 1 || !strings.Contains(got.stderr, "are a token") || strings.Contains(got.stderr, "sesame") {
		t.Errorf("a token: %+v", got)
	}
	write(`{`)
	if got := s.run("", "build", "-t", "web", "--registry-auth", config, dir); got.code != 1 || !strings.Contains(got.stderr, "read Docker's configuration in "+config) {
		t.Errorf("no JSON: %+v", got)
	}
}
