package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestCheckpointsTravel exports checkpoints of sandboxes that count, and continues them in
// another instance, which has nothing of the first: by a file, by a registry, and back again. The parts
// share the two instances and follow each other.
func TestCheckpointsTravel(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	home, away := newSleepy(t, "0s"), newServer(t)
	away.set("BARCHAN_STORE_AFTER", "0s")
	away.start()
	home.apply(travelTemplate)
	source := home.beginTale()
	before := home.tale(source)
	name := home.checkpointOf(source)
	file := filepath.Join(t.TempDir(), "tale.tar")
	bare := filepath.Join(t.TempDir(), "bare.tar")
	home.data("checkpoint", "export", name, file)
	home.writeTo(bare, "checkpoint", "export", name, "-", "--without-image")

	t.Run("damaged on the way", func(t *testing.T) { testDamagedArtifacts(t, home.in(t), away.in(t), file, bare) })
	t.Run("refused", func(t *testing.T) { testRefusedArtifacts(away.in(t), file, bare) })
	t.Run("a server that ends in an export", func(t *testing.T) {
		s := home.in(t)
		testExportCutOff(t, s, name)
		copied := s.continuesFrom(before, strings.Replace(name, "-", ":", 1))
		nested := s.checkpointOf(copied)
		s.must("kill", copied)
		testExportCutOff(t, s, nested)
		s.dropCheckpoints(nested)
	})
	t.Run("by a file", func(t *testing.T) {
		home, away := home.in(t), away.in(t)
		away.importAs("moved", file)
		copied := away.continuesFrom(before, "moved")
		back := filepath.Join(t.TempDir(), "back.tar")
		away.exec(copied, "echo beyond > /home/user/beyond; rm /home/user/kept")
		tale := away.tale(copied)
		again := away.checkpointOf(copied)
		away.must("kill", copied)
		away.data("checkpoint", "export", again, back, "--without-image")
		home.importAs("returned", back)
		home.must("kill", home.continuesFrom(tale, "returned"))
		away.dropCheckpoints("moved", again)
		home.dropCheckpoints("returned")
	})
	t.Run("by a registry", func(t *testing.T) {
		home, away := home.in(t), away.in(t)
		place := portable.Scheme + startRegistry(t) + "/team/tale:1"
		home.data("checkpoint", "export", name, place)
		away.importAs("pulled", place)
		away.must("kill", away.continuesFrom(before, "pulled"))
		away.dropCheckpoints("pulled")
	})
	t.Run("through a pipe, into the same instance", func(t *testing.T) {
		s := home.in(t)
		s.must("kill", source)
		if out, err := s.importFrom(bare, ""); exitCode(err) != 1 || !strings.Contains(out, "another name") {
			t.Errorf("import under a name that is taken = %v\n%s", err, out)
		}
		s.dropCheckpoints(name)
		if out, err := s.importFrom(bare, "again"); err != nil {
			t.Fatalf("import from a pipe: %v\n%s\n%s", err, out, s.tail())
		}
		s.must("kill", s.continuesFrom(before, "again"))
		s.dropCheckpoints("again")
	})
	home.mustKubectl("", "delete", "checkpoints.barchan.dev", name, "--ignore-not-found", patience)
	for _, s := range []*server{home, away} {
		s.wantNoCheckpoints()
		s.untilInOrder()
	}
}

// travelTemplate is of sandboxes with a volume.
const travelTemplate = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: travel}
spec:
  podTemplate:
    spec:
      containers:
      - name: main
        image: ` + baseImage + `
        resources: {limits: {memory: 256Mi}}
        volumeMounts: [{name: scratch, mountPath: /scratch}]
      volumes: [{name: scratch, emptyDir: {}}]
`

// startTale starts a process that counts in memory only, and makes all kinds of
// files.
const startTale = `
set -e
nohup sh -c 'w=$(od -An -N8 -tx8 /dev/urandom | tr -d " "); n=1000; while :; do n=$((n+1)); echo $w $n > /tmp/new; mv /tmp/new /tmp/tale; sleep 0.05; done' >/dev/null 2>&1 &
cd /home/user
head -c 300000 /dev/urandom > kept; chmod 640 kept; ln kept twin; ln -s kept link; mkdir -p deep/er; echo x > deep/er/x
head -c 16000000 /dev/urandom > /home/user/large # more than what lies in buffers on the way
head -c 100000 /dev/urandom > /scratch/kept`

// describeFiles prints what must be the same of files wherever their sandbox continues.
const describeFiles = `
for f in /home/user /scratch; do
  find $f -path '*/.cache' -prune -o ! -type d -printf '%p %y %m %U:%G %n %s %l\n' | sort
  find $f -type f ! -path '*/.cache/*' -exec sha256sum {} + | sort
done`

// tale is how far a sandbox is.
type tale struct {
	word  string
	count int
	files string
}

func (s *server) beginTale() (id string) {
	s.t.Helper()
	id, _ = s.keep("travel", "true")
	s.exec(id, startTale)
	return id
}

// tale returns the current output of the process, not an earlier one's.
func (s *server) tale(id string) (found tale) {
	s.t.Helper()
	s.exec(id, "rm -f /tmp/tale")
	eventually.NoError(s.t, "the process in "+id, func() (err error) {
		fields := strings.Fields(s.exec(id, "cat /tmp/tale 2>/dev/null || true"))
		if len(fields) != 2 {
			return fmt.Errorf("%q", fields)
		}
		found.word = fields[0]
		found.count, err = strconv.Atoi(fields[1])
		return err
	})
	found.files = s.exec(id, describeFiles)
	return found
}

// checkpointOf takes a checkpoint of a sandbox that keeps running, and returns its object's name.
func (s *server) checkpointOf(id string) string {
	s.t.Helper()
	return strings.ReplaceAll(strings.TrimSpace(s.data("snapshot", id, "--name", "tale")), ":", "-")
}

// continuesFrom verifies that a sandbox from a checkpoint continues where its source was: with the same process, which
// continues to count, and the same files. before is the source's state just before the checkpoint.
func (s *server) continuesFrom(before tale, name string) (id string) {
	s.t.Helper()
	id = strings.TrimSpace(s.data("run", "--from", name, "--keep"))
	now := s.tale(id)
	if now.word != before.word || now.count < before.count {
		s.t.Errorf("the sandbox from %s returned %s, %d; before: %s, %d", name, now.word, now.count, before.word, before.count)
	}
	if now.files != before.files {
		s.t.Errorf("the sandbox from %s has files\n%s\nits source has\n%s", name, now.files, before.files)
	}
	if later := s.tale(id); later.count <= now.count {
		s.t.Errorf("the sandbox from %s stands still at %d", name, now.count)
	}
	return id
}

func (s *server) importAs(name, from string) {
	s.t.Helper()
	if out := strings.TrimSpace(s.data("checkpoint", "import", from, "--name", name)); out != name {
		s.t.Errorf("import of %s returned %q, want %q", from, out, name)
	}
}

// importFrom gives the tar to the command's standard input, and so to the server as it is.
func (s *server) importFrom(file, name string) (string, error) {
	s.t.Helper()
	in, err := os.Open(file)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	ctx, cancel := context.WithTimeout(s.t.Context(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, "checkpoint", "import", "-", "--name", name)
	cmd.Env, cmd.Stdin = s.env, in
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// writeTo has a command write its standard output to a file.
func (s *server) writeTo(file string, args ...string) {
	s.t.Helper()
	out, err := os.Create(file)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	ctx, cancel := context.WithTimeout(s.t.Context(), startTime)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, programs.barchan, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = s.env, out, &stderr
	if err := cmd.Run(); err != nil {
		s.t.Fatalf("barchan %s: %v\n%s\n%s", strings.Join(args, " "), err, stderr.String(), s.tail())
	}
}

func (s *server) dropCheckpoints(names ...string) {
	s.t.Helper()
	for _, name := range names {
		s.mustKubectl("", "delete", "checkpoints.barchan.dev", name, patience)
	}
}

// entryOf is where the content of a blob lies in a tar.
type entryOf struct {
	what     string
	at, size int64
	digest   string
}

// baseLayer is what a layer of the base image is for.
const baseLayer = "base image"

// entries are the blobs of an artifact in a tar, by what each is for.
func entries(t *testing.T, file string) (all []entryOf) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	roles := map[string]string{}
	for in := tar.NewReader(f); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		at, err := f.Seek(0, io.SeekCurrent)
		if err != nil {
			t.Fatal(err)
		}
		what := roles[filepath.Base(h.Name)]
		var m ocispec.Manifest
		if b := make([]byte, min(h.Size, 1<<20)); what == "" && h.Size < 1<<20 {
			if _, err := io.ReadFull(in, b); err != nil {
				t.Fatal(err)
			}
			if json.Unmarshal(b, &m) == nil && len(m.Layers) > 0 {
				what = "manifest"
			}
		}
		for _, d := range m.Layers {
			what, compressed := strings.CutPrefix(d.MediaType, portable.FilesType+"+")
			if compressed {
				what = baseLayer
			}
			roles[d.Digest.Encoded()] = strings.TrimSpace(what + " " + d.Annotations[ocispec.AnnotationTitle])
		}
		all = append(all, entryOf{what, at, h.Size, filepath.Base(h.Name)})
	}
}

// testDamagedArtifacts verifies that damaged artifacts are rejected without leftovers: of an artifact
// whose image must come with it, and of a bare one where the image is.
func testDamagedArtifacts(t *testing.T, home, away *server, whole, bare string) {
	images := away.data("image", "ls")
	for _, kind := range []string{baseLayer, portable.MemoryType} {
		away.refusesDamaged(whole, kind)
	}
	if now := away.data("image", "ls"); now != images {
		t.Errorf("images were\n%s\nand are\n%s", images, now)
	}
	for _, kind := range []string{"manifest", portable.FilesType, portable.AgentType, portable.VolumeType, portable.MemoryType} {
		home.refusesDamaged(bare, kind)
	}
	away.untilInOrder()
	home.untilInOrder()
}

// refusesDamaged damages one blob of a kind.
func (s *server) refusesDamaged(file, kind string) {
	s.t.Helper()
	blobs := entries(s.t, file)
	i := slices.IndexFunc(blobs, func(e entryOf) bool { return e.size > 0 && (e.what == kind || strings.HasPrefix(e.what, kind+" ")) })
	if i < 0 {
		s.t.Fatalf("the artifact has no %s: %+v", kind, blobs)
	}
	bad := filepath.Join(s.t.TempDir(), "bad.tar")
	for damage, do := range map[string]func(string, int64) error{"a flipped bit": flip, "a cut": os.Truncate} {
		if out, err := exec.CommandContext(s.t.Context(), "cp", file, bad).CombinedOutput(); err != nil {
			s.t.Fatalf("%v: %s", err, out)
		}
		if err := do(bad, blobs[i].at+blobs[i].size/2); err != nil {
			s.t.Fatal(err)
		}
		s.refuses(damage+" in "+kind, func() (string, error) { return s.importFrom(bad, "bad") }, "damaged", "ends too early")
		if kind == portable.MemoryType {
			s.refuses(damage+" in a file", func() (string, error) { return s.try("checkpoint", "import", bad, "--name", "bad") }, "damaged", "ends too early")
		}
	}
}

// refuses verifies that an import fails for one of some reasons, and leaves no object or data.
func (s *server) refuses(what string, give func() (string, error), reasons ...string) {
	s.t.Helper()
	kept := filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "checkpoints", "*")
	objects := s.checkpoints()
	data, err := filepath.Glob(kept)
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := give()
	if code := exitCode(err); code != 1 && code != interrupted || !slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(out, r) }) {
		s.t.Errorf("import with %s = %v, want one of %q\n%s", what, err, reasons, out)
	}
	eventually.NoError(s.t, "nothing is left of an import with "+what, func() error {
		nowObjects := s.checkpoints()
		nowData, err := filepath.Glob(kept)
		if err != nil || !slices.Equal(nowObjects, objects) || !slices.Equal(nowData, data) {
			return fmt.Errorf("objects %v and data %v, were %v and %v: %w", nowObjects, nowData, objects, data, err)
		}
		return nil
	})
}

// interrupted is the exit code of a command that SIGINT has ended.
const interrupted = 130

// testRefusedArtifacts is of what is whole, and cannot be used; or comes and does not end.
func testRefusedArtifacts(s *server, whole, bare string) {
	s.refuses("no base image here", func() (string, error) { return s.importFrom(bare, "bare") }, "pull it first")
	s.refuses("nothing", func() (string, error) { return s.importFrom(os.DevNull, "nothing") }, "ends too early")
	s.refuses("a name that is none", func() (string, error) { return s.importFrom(whole, "No Name") }, "No Name")
	s.refuses("a client that goes", func() (string, error) { return s.importHalf(whole) }, "")
	s.untilInOrder()
}

// testExportCutOff ends the server while it reads the files of a checkpoint for a client, which gets no whole
// artifact. Nothing of the reading stays, and the checkpoint does.
func testExportCutOff(t *testing.T, s *server, name string) {
	ctx, cancel := context.WithTimeout(t.Context(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, "checkpoint", "export", name, "-", "--without-image")
	var stderr bytes.Buffer
	cmd.Env, cmd.Stderr = s.env, &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, out, 1<<20); err != nil { // the files have begun, and come no further
		t.Fatal(errors.Join(err, cmd.Wait(), errors.New(stderr.String())))
	}
	s.stop(syscall.SIGKILL)
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); exitCode(err) != 1 {
		t.Errorf("an export that has no end = %v\n%s", err, stderr.String())
	}
	s.start()
	s.untilInOrder()
	again := filepath.Join(t.TempDir(), "again.tar")
	s.data("checkpoint", "export", name, again, "--without-image")
}

// importHalf has a client end in the middle of an import.
func (s *server) importHalf(file string) (string, error) {
	s.t.Helper()
	info, err := os.Stat(file)
	if err != nil {
		s.t.Fatal(err)
	}
	p := s.importUpTo(file, "half", info.Size()/2)
	eventually.NoError(s.t, "the object of the import is there", func() error {
		if len(s.checkpoints()) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		s.t.Fatal(err)
	}
	return p.end()
}

// partial is an import from a pipe that stays open.
type partial struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	in     io.WriteCloser
	rest   *os.File // what has not come yet
}

// importUpTo begins one, in which nothing comes after a place of the artifact until the test continues.
func (s *server) importUpTo(file, name string, place int64) *partial {
	s.t.Helper()
	rest, err := os.Open(file)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*startTime) // for all that is waited for meanwhile
	s.t.Cleanup(func() {
		cancel()
		_ = rest.Close()
	})
	p := &partial{cmd: exec.CommandContext(ctx, programs.barchan, "checkpoint", "import", "-", "--name", name), rest: rest}
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = s.env, &p.stderr, &p.stderr
	p.in, err = p.cmd.StdinPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err == nil {
		_, err = io.CopyN(p.in, rest, place)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

// end closes the pipe, whose other side may have gone, and returns the command's output.
func (p *partial) end() (string, error) {
	_ = p.in.Close()
	err := p.cmd.Wait()
	return p.stderr.String(), err
}

// middleOf is a place in the middle of a large blob of a kind.
func middleOf(t *testing.T, file, kind string) int64 {
	t.Helper()
	blobs := entries(t, file)
	i := slices.IndexFunc(blobs, func(e entryOf) bool { return e.what == kind && e.size > 1<<20 })
	if i < 0 {
		t.Fatalf("the artifact has no %s: %+v", kind, blobs)
	}
	return blobs[i].at + blobs[i].size/2
}

// flip changes one bit of a file.
func flip(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	b := []byte{0}
	_, err = f.ReadAt(b, at)
	if err == nil {
		b[0] ^= 1
		_, err = f.WriteAt(b, at)
	}
	return errors.Join(err, f.Close())
}
