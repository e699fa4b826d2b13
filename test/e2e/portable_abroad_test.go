package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestCheckpointsAbroad brings a checkpoint to where its memory cannot be restored, or where something breaks
// on the way: another build of gVisor, a processor or a machine of another kind, a registry that goes, a
// server that ends. The parts share two instances and follow each other.
func TestCheckpointsAbroad(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	home, away := newSleepy(t, "0s"), newServer(t)
	here, there := away.otherRunsc()
	away.set("BARCHAN_RUNSC_BINARY", there)
	away.set("BARCHAN_SPARE_NETWORKS", "0")
	away.start()
	home.apply(travelTemplate)
	source := home.beginTale()
	name := home.checkpointOf(source)
	dir := t.TempDir()
	file, bare := filepath.Join(dir, "tale.tar"), filepath.Join(dir, "bare.tar")
	home.data("checkpoint", "export", name, file)
	home.data("checkpoint", "export", name, bare, "--without-image")
	kept := home.exec(source, "cat /home/user/kept | sha256sum")

	t.Run("a server that ends in an import", func(t *testing.T) {
		for _, kind := range []string{baseLayer, portable.MemoryType + " pages.img"} {
			testImportCutOff(t, away.in(t), file, kind)
		}
	})
	t.Run("by registries", func(t *testing.T) { testRegistries(t, home.in(t), away.in(t), name) })
	t.Run("another build", func(t *testing.T) {
		s := away.in(t)
		out := s.must("checkpoint", "import", file, "--name", "moved")
		s.saysOf("import", out, "warning: ", shaOf(t, here)[:12], shaOf(t, there)[:12])
		s.wantFilesOnly("moved", kept, shaOf(t, here)[:12], shaOf(t, there)[:12])
	})
	t.Run("a better processor", func(t *testing.T) {
		s := home.in(t)
		better := forge(t, bare, func(c *portable.Config, node, image map[string]any) {
			c.Memory.CPUFeatures = append(c.Memory.CPUFeatures, "flux")
			for _, build := range []any{at(t, node, "memory", "build"), at(t, image, "build")} {
				b := build.(map[string]any) //nolint:forcetypeassert // at has found it
				b["cpuFeatures"] = append(b["cpuFeatures"].([]any), "flux")
			}
		})
		out := s.must("checkpoint", "import", better, "--name", "better")
		s.saysOf("import", out, "warning: ", "a processor with flux")
		s.wantFilesOnly("better", kept, "a processor with flux")
	})
	t.Run("another architecture", func(t *testing.T) {
		s := home.in(t)
		alien := forge(t, bare, func(c *portable.Config, _, _ map[string]any) { c.Architecture = "riscv64" })
		s.refuses("another architecture", func() (string, error) { return s.try("checkpoint", "import", alien, "--name", "alien") },
			fmt.Sprintf(`config.architecture: "riscv64", this host's is %s`, runtime.GOARCH))
	})
	t.Run("names of templates", func(t *testing.T) {
		s := home.in(t)
		s.importAs("named", bare)
		s.importAs("older", forge(t, bare, func(c *portable.Config, _, _ map[string]any) { c.Source.TemplateName = "" }))
		for name, want := range map[string]string{"named": "travel", "older": "-"} {
			if got := s.column("checkpoint", name, "TEMPLATE"); got != want {
				t.Errorf("checkpoint ls: the template of %s is %q, want %q", name, got, want)
			}
			if got := s.column("snapshot", name+":default", "TEMPLATE"); got != want {
				t.Errorf("snapshot ls: the template of %s is %q, want %q", name, got, want)
			}
			s.must("run", "--from", name, "--", "true")
		}
		bad := forge(t, bare, func(c *portable.Config, _, _ map[string]any) { c.Source.TemplateName = "\x1b[2J" })
		s.refuses("a name that is none", func() (string, error) { return s.try("checkpoint", "import", bad, "--name", "bad") }, "config.source.templateName")
		s.dropCheckpoints("named", "older")
	})
	home.must("kill", source)
	home.dropCheckpoints(name)
	for _, s := range []*server{home, away} {
		s.wantNoCheckpoints()
		s.untilInOrder()
	}
}

// otherRunsc makes another build of gVisor of the one that is here, by a byte at its end.
func (s *server) otherRunsc() (here, there string) {
	s.t.Helper()
	here = filepath.Join("/var/cache/barchan", "bin", "runsc")
	if dir := os.Getenv("BARCHAN_CACHE"); dir != "" {
		here = filepath.Join(dir, "bin", "runsc")
	}
	b, err := os.ReadFile(here)
	if err != nil {
		s.t.Fatal(err)
	}
	there = filepath.Join(s.dir, "runsc") // which stays until the server has removed itself
	if err := os.WriteFile(there, append(b, 'x'), 0o755); err != nil {
		s.t.Fatal(err)
	}
	return here, there
}

func shaOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

func (s *server) saysOf(what, out string, texts ...string) {
	s.t.Helper()
	for _, text := range texts {
		if !strings.Contains(out, text) {
			s.t.Errorf("%s does not contain %q:\n%s", what, text, out)
		}
	}
}

// wantFilesOnly verifies that the memory of an imported checkpoint is refused for reasons, its files work, and
// removes it.
func (s *server) wantFilesOnly(name, kept string, reasons ...string) {
	s.t.Helper()
	out, err := s.try("run", "--from", name, "--", "true")
	if exitCode(err) != 1 {
		s.t.Errorf("run --from %s = %v\n%s", name, err, out)
	}
	s.saysOf("run --from "+name, out, append(slices.Clone(reasons), "filesOnly")...)
	if got := s.data("run", "--from", name, "--files-only", "--", "sh", "-c", "cat /home/user/kept | sha256sum"); strings.TrimSpace(got) != kept {
		s.t.Errorf("the files of %s: %q, want %q", name, got, kept)
	}
	s.dropCheckpoints(name)
}

// column is what a list has of one thing.
func (s *server) column(noun, name, column string) string {
	s.t.Helper()
	lines := strings.Split(s.data(noun, "ls"), "\n")
	where := strings.Index(lines[0], column)
	for _, line := range lines[1:] {
		if where >= 0 && slices.Contains(strings.Fields(line), name) {
			return strings.Fields(line[where:])[0]
		}
	}
	s.t.Errorf("%s ls has no %s of %s:\n%s", noun, column, name, strings.Join(lines, "\n"))
	return ""
}

// at goes down into JSON.
func at(t *testing.T, from map[string]any, path ...string) map[string]any {
	t.Helper()
	for _, name := range path {
		next, ok := from[name].(map[string]any)
		if !ok {
			t.Fatalf("there is no %s in %v", name, path)
		}
		from = next
	}
	return from
}

// forge makes another artifact of one without an image: what edit changes of its config, of what the node
// wrote, and of the description of its memory; all else, digests too, is the writer's.
func forge(t *testing.T, file string, edit func(c *portable.Config, node, image map[string]any)) (forged string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(file)
	must(err)
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	must(err)
	whole, err := portable.OpenFile(t.Context(), f, info.Size())
	must(err)
	var node, image map[string]any
	must(json.Unmarshal(whole.Config.Node, &node))
	var layers []portable.Layer
	blobs := entries(t, file)
	for _, d := range whole.Layers {
		i := slices.IndexFunc(blobs, func(e entryOf) bool { return e.digest == d.Digest.Encoded() })
		part := io.NewSectionReader(f, blobs[i].at, blobs[i].size)
		if portable.Title(d) == "image.json" {
			b, err := io.ReadAll(part)
			must(err)
			must(json.Unmarshal(b, &image))
		}
		layers = append(layers, portable.Layer{Descriptor: d, Content: func(_ context.Context, w io.Writer) error {
			_, err := io.Copy(w, io.NewSectionReader(part, 0, part.Size()))
			return err
		}})
	}
	config := whole.Config
	config.Memory = new(*config.Memory)
	edit(&config, node, image)
	config.Node, err = json.Marshal(node)
	must(err)
	text := describeImage(t, image)
	last := len(layers) - 1
	layers[last], err = portable.Measure(t.Context(), portable.MemoryType, "image.json", func(_ context.Context, w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
	must(err)
	made, err := portable.NewLayout(config, nil, nil, layers)
	must(err)
	out, err := os.CreateTemp(t.TempDir(), "forged-*.tar")
	must(err)
	must(made.Write(t.Context(), out))
	must(out.Close())
	return out.Name()
}

// describeImage writes the description of a memory as package oci does: its checksum, of what it is
// without, is its last field.
func describeImage(t *testing.T, image map[string]any) []byte {
	t.Helper()
	delete(image, "crc32c")
	b, err := json.Marshal(image)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Appendf(b[:len(b)-1], `,"crc32c":"%08x"}`, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// content is what the server's containerd has of images, whole or on its way.
func (s *server) content() (files []string) {
	s.t.Helper()
	root := filepath.Join(s.value("BARCHAN_DATA_DIR"), "containerd", "root", "io.containerd.content.v1.content")
	for _, pattern := range []string{"blobs/sha256/*", "ingest/*"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			s.t.Fatal(err)
		}
		files = append(files, found...)
	}
	return files
}

// images are the names and digests of those that are here.
func (s *server) images() (names []string) {
	s.t.Helper()
	var all []listedImage
	s.read(&all, "image", "ls")
	for _, x := range all {
		names = append(names, x.Ref+" "+x.Digest)
	}
	return names
}

// testImportCutOff kills the server in the middle of a blob of an import. The next one has nothing of it:
// no data, no image, no unreferenced content.
func testImportCutOff(t *testing.T, s *server, file, kind string) {
	images, content, objects := s.images(), s.content(), s.checkpoints()
	p := s.importUpTo(file, "cut", middleOf(t, file, kind))
	eventually.NoError(t, "some of it has come", func() error {
		if slices.Equal(s.content(), content) || (kind != baseLayer && slices.Equal(s.images(), images)) {
			return errors.New("it has not")
		}
		return nil
	})
	s.stop(syscall.SIGKILL)
	if out, err := p.end(); exitCode(err) != 1 {
		t.Errorf("an import whose server ends = %v\n%s", err, out)
	}
	s.start()
	eventually.NoError(t, "nothing is left of it", func() error {
		if now := s.images(); !slices.Equal(now, images) {
			return fmt.Errorf("images %v", now)
		}
		if now := s.content(); !slices.Equal(now, content) {
			return fmt.Errorf("content %v, was %v", now, content)
		}
		return nil
	})
	eventually.NoError(t, "its object reports it", func() error {
		if got := s.column("checkpoint", "cut", "PHASE"); got != "Failed" {
			return errors.New(got)
		}
		return nil
	})
	s.dropCheckpoints("cut")
	if now := s.checkpoints(); !slices.Equal(now, objects) {
		t.Errorf("checkpoints %v, were %v", now, objects)
	}
	s.untilInOrder()
}
