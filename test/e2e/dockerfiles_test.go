package e2e

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
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
`

const secretText = "s3cr3t-0123456789abcdef"

// stages builds a Dockerfile with stages, mounts and a secret, and again after changes.
func (s *server) stages(t *testing.T) {
	dir, secret := t.TempDir(), filepath.Join(t.TempDir(), "token")
	writeFiles(t, dir, map[string]string{
		"Dockerfile": stagedDockerfile, "src/main.c": "#include <stdio.h>\nint main() { puts(\"hello\"); return 0; }\n", "src/note": "a note\n",
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
		out := s.must("build", "-t", "staged", "--secret", "id=token,src="+secret, dir)
		t.Log(out)
		return out
	}
	out := build()
	if strings.Contains(out, "exit 1") || !strings.Contains(out, "this stage is left out") {
		t.Errorf("the unused stage is built:\n%s", out)
	}
	if strings.Contains(out, secretText) || !strings.Contains(out, "it is ***") {
		t.Errorf("the log has the secret, or not its line:\n%s", out)
	}
	id, got := s.keep("staged", "sh", "-c", `prog; cat /length /srv/src/said; stat -c %u:%g /usr/local/bin/prog /srv/src/prog; ls /tree /tree/src; cat /both /added/f
		ls -A /root/.token /run/secrets /scratch /var/cache/objects /mnt /run/barchan 2>/dev/null; ls /taken`)
	want := "hello\n23\nhello\n7:8\n1000:1000\n"
	t.Logf("%s", got)
	if !strings.HasPrefix(got, want) {
		t.Errorf("in a sandbox of it: %q, want %q first", got, want)
	}
	s.must("rm", id)
	s.searchFor(t, secretText)
}

// searchFor fails if a file of the server's data has a text.
func (s *server) searchFor(t *testing.T, text string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || (err == nil && !d.Type().IsRegular()) {
			return nil
		}
		if err != nil {
			return err
		}
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		files++
		if bytes.Contains(content, []byte(text)) {
			t.Errorf("%s has the secret", path)
		}
		return err
	})
	if err != nil || files < 100 {
		t.Errorf("searched %d files: %v", files, err)
	}
}
