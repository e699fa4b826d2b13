package e2e

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
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
RUN --network=none ! curl -s --max-time 5 http://192.0.2.1/ && echo offline > /offline
COPY src/main.c .
RUN --mount=type=cache,target=/var/cache/objects,id=objects --mount=type=tmpfs,target=/scratch \
    ls -A /var/cache/objects > before && touch "/var/cache/objects/$(date +%s%N)" /scratch/gone && \
    gcc -o prog main.c && chown 7:8 prog && ln -s /src/prog /latest

FROM ` + baseImage + ` AS unused
RUN exit 1

FROM compiler AS checked
RUN ./prog > said

FROM ` + baseImage + `
COPY src/note /note
RUN --mount=type=secret,id=token --mount=type=secret,id=token,target=/root/.token,mode=0440 --mount=type=secret,id=token,env=TOKEN \
    test "$(cat /run/secrets/token)" = "$(cat /root/.token)" && test "$TOKEN" = "$(cat /root/.token)" && echo "it is $TOKEN" && wc -c < /run/secrets/token > /length
COPY --from=compiler /latest /usr/local/bin/prog
COPY --from=checked --chown=user /src /srv/src/
COPY --from=compiler --parents --exclude=*.c /src/./ /offline /tree/
COPY --from=` + baseImage + ` /etc/debian_version /etc/debian_ver* /taken/
RUN --mount=type=bind,source=src/note,target=/mnt/note --mount=type=bind,from=compiler,source=/src,target=/mnt/src cat /mnt/note /mnt/src/main.c > /both
ADD packed.tar.gz /added/
CMD ["sleep", "12345"]
HEALTHCHECK --timeout=3s CMD pgrep -f "sleep 12345"
`

const secretText = "s3cr3t-0123456789abcdef"

// stages builds a Dockerfile with stages, mounts and a secret, and again after changes.
func (s *server) stages(t *testing.T) {
	dir, secret := t.TempDir(), filepath.Join(t.TempDir(), "token")
	writeFiles(t, dir, map[string]string{
		"Dockerfile": stagedDockerfile, "src/main.c": "#include <stdio.h>\nint main() { puts(\"hello\"); return 0; }\n", "src/note": "a note to find\n",
		"packed/f": "of an archive\n",
	})
	if out, err := exec.CommandContext(t.Context(), "tar", "-C", filepath.Join(dir, "packed"), "-czf", filepath.Join(dir, "packed.tar.gz"), ".").CombinedOutput(); err != nil {
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
	_, got := s.keep("staged", "sh", "-c", `prog; cat /length /srv/src/said; stat -c %u:%g /usr/local/bin/prog /srv/src/prog; ls /tree; cat /both /added/f; ls -x /taken
		ls -A /root/.token /run/secrets /mnt/note /run/barchan/0 2>/dev/null; pgrep -fc "sleep 12345"`)
	want := "hello\n23\nhello\n7:8\n1000:1000\nbefore\noffline\nprog\na note to find\n#include <stdio.h>\nint main() { puts(\"hello\"); return 0; }\nof an archive\ndebian_version\n" +
		"/run/barchan/0:\n\n/run/secrets:\n1\n"
	if got != want {
		t.Errorf("in a sandbox of it: %q, want %q", got, want)
	}
	s.searchFor(t, "a note to find", true)
	s.searchFor(t, "sleep\x0012345", true) // in memory
	s.searchFor(t, secretText, false)

	rerun := func() (steps string) {
		t.Helper()
		for line := range strings.Lines(build()) {
			if place, text, is := strings.Cut(line, "] "); is && place[0] == '[' && !strings.Contains(line, "(cached)") {
				words := strings.Fields(text)
				steps += place[1:] + " " + words[0] + ";"
			}
		}
		return steps
	}
	if got := rerun(); got != "" {
		t.Errorf("without a change it runs %s", got)
	}
	writeFiles(t, dir, map[string]string{"Dockerfile": strings.Replace(stagedDockerfile, "./prog > said", "./prog > said; echo more >> said", 1)})
	if got := rerun(); got != "checked 7/7 RUN;6/12 COPY;7/12 COPY;8/12 COPY;9/12 RUN;10/12 ADD;11/12 USER;12/12 WORKDIR;" {
		t.Errorf("after a change of one line in a stage it runs %s", got)
	}
	writeFiles(t, dir, map[string]string{"src/main.c": "#include <stdio.h>\nint main() { puts(\"changed\"); return 0; }\n"})
	if got := rerun(); !strings.HasPrefix(got, "compiler 5/6 COPY;compiler 6/6 RUN;5/12 COPY;checked 7/7 RUN;6/12 COPY;") {
		t.Errorf("after a change of a file of a stage it runs %s", got)
	}
	if _, got := s.keep("staged", "sh", "-c", "prog; cat /srv/src/said; wc -l < /tree/before"); got != "changed\nchanged\nmore\n1\n" {
		t.Errorf("in a sandbox of the last: %q, with a line for each earlier object in the cache", got)
	}
	s.searchFor(t, secretText, false)
}

// searchFor fails unless a file of the server's data has a text, or if one has that should not.
func (s *server) searchFor(t *testing.T, text string, want bool) {
	t.Helper()
	var found []string
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || (err == nil && !d.Type().IsRegular()) {
			return nil
		}
		if err != nil {
			return err
		}
		content, err := os.ReadFile(path)
		if bytes.Contains(content, []byte(text)) {
			found = append(found, path)
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EINVAL) { // a network namespace is no file
			return nil
		}
		return err
	})
	if err != nil || (len(found) > 0) != want {
		t.Errorf("%q is in %q, error %v", text, found, err)
	}
}
