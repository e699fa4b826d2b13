package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// writeFiles writes files by their paths in a directory.
func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}

// stagedDockerfile compiles a program in one stage, and takes it from there.
const stagedDockerfile = `FROM ` + baseImage + ` AS compiler
WORKDIR /src
COPY src/main.c .
RUN --mount=type=cache,target=/var/cache/objects,id=objects --mount=type=tmpfs,target=/scratch --network=none \
    ls -A /var/cache/objects > before && touch "/var/cache/objects/$(date +%s%N)" /scratch/gone && \
    gcc -o prog main.c && chown 7:8 prog && ln -s /src/prog /latest && ! curl -s --max-time 5 http://192.0.2.1/

FROM ` + baseImage + ` AS unused
RUN exit 1

FROM compiler AS checked
RUN --mount=type=bind,from=compiler,source=/src,target=/mnt/src ./prog > said && cat /mnt/src/main.c >> said

FROM ` + baseImage + `
RUN --mount=type=secret,id=token --mount=type=secret,id=token,target=/root/.token,mode=0440 --mount=type=secret,id=token,env=TOKEN \
    --mount=type=bind,source=src/note,target=/mnt/note \
    test "$(cat /run/secrets/token)" = "$(cat /root/.token)" && test "$TOKEN" = "$(cat /root/.token)" && echo "it is $TOKEN" && \
    wc -c < /run/secrets/token > /length && cat /mnt/note > /note
COPY --from=compiler /latest /usr/local/bin/prog
COPY --from=checked --chown=user --exclude=*.c /src /srv/src/
COPY --from=` + baseImage + ` --parents /etc/./debian_ver* /etc/hostname /taken/
ADD packed.tar.gz /added/
CMD ["sleep", "12345"]
HEALTHCHECK --timeout=3s CMD pgrep -x sleep
`

const secretText = "s3cr3t-0123456789abcdef"

// stages builds a Dockerfile with stages, mounts and a secret, and again after changes.
func (s *server) stages(t *testing.T) {
	dir, secret := t.TempDir(), filepath.Join(t.TempDir(), "token")
	writeFiles(t, dir, map[string]string{
		"Dockerfile": stagedDockerfile, "src/main.c": source("hello"), "src/note": "a note to find\n",
		"packed/f": "of an archive\n",
	})
	if out, err := exec.CommandContext(t.Context(), "tar", "-C", filepath.Join(dir, "packed"), "--mode=a+rX", "-czf", filepath.Join(dir, "packed.tar.gz"), ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.WriteFile(secret, []byte(secretText), 0o600); err != nil {
		t.Fatal(err)
	}
	build := func() string {
		t.Helper()
		began := time.Now()
		out := s.must("build", "-t", "staged", "--secret", "id=token,src="+secret, dir)
		t.Logf("%s\n%s", time.Since(began), out)
		return out
	}
	out := build()
	if strings.Contains(out, "exit 1") || !strings.Contains(out, "this stage is left out") {
		t.Errorf("the unused stage is built:\n%s", out)
	}
	if strings.Contains(out, secretText) || !strings.Contains(out, "it is ***") {
		t.Errorf("the log has the secret, or not its line:\n%s", out)
	}
	_, got := s.keep("staged", "sh", "-c", `prog; cat /length /srv/src/said; stat -c %u:%g /usr/local/bin/prog /srv/src/prog; ls /srv/src; cat /note /added/f; ls /taken /taken/etc
		ls -A /root/.token /run/secrets /mnt /run/barchan/* 2>/dev/null; pgrep -xc sleep`)
	want := "hello\n23\nhello\n" + source("hello") + "7:8\n1000:1000\nbefore\nprog\nsaid\na note to find\nof an archive\n/taken:\ndebian_version\netc\n\n/taken/etc:\nhostname\n/mnt:\n\n/run/barchan/0:\n\n/run/barchan/3:\n\n/run/secrets:\n1\n"
	if got != want {
		t.Errorf("in a sandbox of it: %q, want %q", got, want)
	}
	s.searchFor(t, secretText, "a note to find", "sleep\x0012345") // the last one is in memory

	rerun := func() (steps string) {
		t.Helper()
		for line := range strings.Lines(build()) {
			if place, text, is := strings.Cut(line, "] "); is && place[0] == '[' && !strings.Contains(line, "(cached)") {
				steps += place[1:] + " " + strings.Fields(text)[0] + ";"
			}
		}
		return steps
	}
	if got := rerun(); got != "" {
		t.Errorf("without a change it runs %s", got)
	}
	writeFiles(t, dir, map[string]string{"src/main.c": source("changed")})
	if got := rerun(); got != "compiler 1/5 USER;compiler 2/5 WORKDIR;compiler 3/5 WORKDIR;compiler 4/5 COPY;compiler 5/5 RUN;4/9 COPY;checked 6/6 RUN;5/9 COPY;6/9 COPY;7/9 ADD;8/9 USER;9/9 WORKDIR;" {
		t.Errorf("after a change of one line of a stage's file it runs %s", got)
	}
	if _, got := s.keep("staged", "sh", "-c", "prog; head -1 /srv/src/said; wc -l < /srv/src/before"); got != "changed\nchanged\n1\n" {
		t.Errorf("in a sandbox of the last: %q, with a line for each earlier object in the cache", got)
	}
}

func source(word string) string {
	return fmt.Sprintf("#include <stdio.h>\nint main() { puts(%q); return 0; }\n", word)
}

const stagedManifest = `
apiVersion: barchan.dev/v1alpha1
kind: TemplateBuild
metadata: {name: %s}
spec:
  templateName: %[1]s
  from: {image: "` + baseImage + `"}
  stages: [{name: tools, from: {image: "` + baseImage + `"}, steps: [{type: Run, args: ["ln -s /proc/1/environ /out; mkdir -p /d; mkfifo /d/pipe; echo x > /d/f", root]}]}]
  steps: [%s]
`

// objects builds TemplateBuilds with stages.
func (s *server) objects(t *testing.T) {
	tests := map[string]struct{ steps, step, want string }{
		"fine":        {steps: `{type: Copy, args: [/d, /d], from: {stage: tools}}, {type: Run, args: ["test ! -e /run/secrets/none && test -f /d/f && test ! -e /d/pipe"], mounts: [{type: Secret, id: none}]}`},
		"no-file":     {steps: `{type: Copy, args: [/none, /x], from: {stage: tools}}`, step: "1", want: `failed to copy from stage 'tools': there is no "/none"`},
		"link":        {steps: `{type: Copy, args: [/dev/zero, /x], from: {stage: tools}}`, step: "1", want: `failed to copy from stage 'tools': "/dev/zero" is no file and no directory`},
		"sparse":      {steps: `{type: Run, args: ["exit 3"]}, {type: Copy, args: [/d, /x], from: {stage: tools}}`, step: "1", want: "failed to run command 'exit 3': command failed: exit status 3"},
		"no-secret":   {steps: `{type: Run, args: ["true"], mounts: [{type: Secret, id: none, required: true}]}`, step: "1", want: "the build has no secret 'none'"},
		"link-exists": {steps: `{type: Run, args: ["true"], mounts: [{type: Bind, stage: tools, source: /d/f, target: /etc/passwd}]}`, step: "1", want: "failed to mount '/etc/passwd'"},
	}
	for name, tt := range tests {
		s.apply(fmt.Sprintf(stagedManifest, "staged-"+name, tt.steps))
	}
	for name, tt := range tests {
		b := s.ended("staged-" + name)
		if why := b.Status.Conditions[0].Message; b.Status.FailedStep != tt.step || (tt.want != "" && !strings.HasPrefix(why, tt.want)) {
			t.Errorf("%s: step %q: %s", name, b.Status.FailedStep, why)
		}
	}
}

// searchFor fails if a file of the server's data has the first text, or none has another one.
func (s *server) searchFor(t *testing.T, never string, some ...string) {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || (err == nil && !d.Type().IsRegular()) {
			return nil
		}
		if err != nil {
			return err
		}
		err = eachBlock(path, func(content []byte) {
			for _, text := range append(some, never) {
				if bytes.Contains(content, []byte(text)) {
					found[text] = path
				}
			}
		})
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ESPIPE) { // a network namespace is no file
			return nil
		}
		return err
	})
	if err != nil || found[never] != "" || len(found) != len(some) {
		t.Errorf("%q is in %q, error %v", append(some, never), found, err)
	}
}

// eachBlock calls f with what a file holds, a block at a time. Blocks overlap, and holes are left out: a sandbox's disk is a large file with
// little in it.
func eachBlock(path string, f func([]byte)) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	const overlap = 256
	buffer := make([]byte, 1<<20)
	for at := int64(0); ; {
		data, err := file.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		n, err := file.ReadAt(buffer, data)
		f(buffer[:n])
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		at = data + int64(n) - overlap
	}
}
