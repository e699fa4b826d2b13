package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/opencontainers/go-digest"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// travel has one checkpoint, large, which leaves and comes. A test may have it stand still.
type travel struct {
	// holdAt is where it does, and stays until the client goes: measure or export.
	holdAt atomic.Value
	// inUse are exports that are not released and imports that have not ended.
	inUse atomic.Int32
}

const travelSize = 8 << 20

func (t *travel) hold(ctx context.Context, at string) error {
	if now, _ := t.holdAt.Load().(string); now != at {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (t *travel) Export(
	ctx context.Context, req adminclient.CheckpointExport, progress func(adminclient.Event),
) (*portable.Layout, []string, func(), error) {
	if req.Name != "one" {
		return nil, nil, nil, errs.Public(errs.ErrNotFound, "checkpoint "+req.Name+" not found")
	}
	t.inUse.Add(1)
	release := sync.OnceFunc(func() { t.inUse.Add(-1) })
	measured := false
	files, err := portable.Measure(ctx, portable.FilesType, "", func(ctx context.Context, w io.Writer) error {
		at := "export"
		if !measured {
			at = "measure"
			for done := range int64(20) { // more than some clients take
				progress(adminclient.Event{Step: at, Done: done, Total: 100, Bytes: true})
			}
			progress(adminclient.Event{Step: at, Done: travelSize / 2, Total: travelSize, Bytes: true})
		}
		half := bytes.Repeat([]byte("f"), travelSize/2)
		_, err := w.Write(half)
		if err == nil {
			err = t.hold(ctx, at)
		}
		if err == nil {
			_, err = w.Write(half)
		}
		return err
	})
	if err != nil {
		release()
		return nil, nil, nil, err
	}
	measured = true
	l, err := portable.NewLayout(portable.Config{
		Name: "one", Architecture: "amd64", Class: "gvisor", Source: portable.Source{SandboxName: "s"},
		Image: portable.Image{Reference: "x", Chain: digest.FromString("chain")}, Node: json.RawMessage(`{}`),
	}, nil, nil, []portable.Layer{files})
	return l, []string{"take care"}, release, err
}

func (t *travel) Import(_ context.Context, _ adminclient.CheckpointImport, tar io.Reader, _ func(adminclient.Event)) (made adminclient.Imported, err error) {
	t.inUse.Add(1)
	defer t.inUse.Add(-1)
	in, err := portable.Read(tar)
	if err != nil {
		return made, err
	}
	for {
		b, err := in.Next()
		if errors.Is(err, io.EOF) {
			return adminclient.Imported{Name: in.Config.Name, Warnings: []string{"take care"}}, nil
		} else if err != nil {
			return made, err
		}
		if err := b.Close(); err != nil {
			return made, err
		}
	}
}

// typist is a command at a terminal, which is where all but its standard input is.
type typist struct {
	t     *testing.T
	cmd   *exec.Cmd
	keys  *os.File
	shows screen
	wg    sync.WaitGroup
}

func (s *server) atTerminal(t *testing.T, stdin io.Reader, args ...string) *typist {
	t.Helper()
	y := &typist{t: t, cmd: exec.CommandContext(t.Context(), "barchan", append([]string{"--data-dir", s.dir}, args...)...)}
	y.cmd.Stdin = stdin
	var err error
	y.keys, err = pty.StartWithAttrs(y.cmd, &pty.Winsize{Rows: 24, Cols: 100}, &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 1})
	if err != nil {
		t.Fatal(err)
	}
	y.wg.Go(func() { _, _ = io.Copy(&y.shows, y.keys) }) // ends with the terminal
	t.Cleanup(func() { _ = y.keys.Close(); y.wg.Wait() })
	return y
}

func (y *typist) sees(text string) {
	y.t.Helper()
	eventually.True(y.t, "the terminal shows "+text, func() bool { return y.shows.has(text) })
}

// ends wants the command to end with an exit code.
func (y *typist) ends(code int) {
	y.t.Helper()
	late := time.AfterFunc(eventually.Patience, func() { _ = y.cmd.Process.Signal(syscall.SIGQUIT) }) // it prints its goroutines
	defer late.Stop()
	_ = y.cmd.Wait()
	y.wg.Wait()
	if got := y.cmd.ProcessState.ExitCode(); got != code {
		y.t.Errorf("ended with %d, want %d; the terminal shows %q", got, code, y.shows.b.String())
	}
}

// Exports and imports report progress on a terminal only.
func TestTransfersTellHowFar(t *testing.T) {
	s := newServer(t, nil)
	file := filepath.Join(t.TempDir(), "one.tar")
	s.run("", "checkpoint", "export", "one", file).want(t, 0, "", "warning: take care\n")
	if r := s.run("", "checkpoint", "export", "one", file); r.stderr != "warning: take care\n" {
		t.Errorf("export without a terminal printed %q", r.stderr)
	}
	if r := s.run("", "checkpoint", "import", file); r.stdout != "one\n" || r.stderr != "warning: take care\n" {
		t.Errorf("import without a terminal printed %q and %q", r.stdout, r.stderr)
	}
	s.run("", "checkpoint", "export", "none", file).want(t, 1, "", "barchan: checkpoint none not found\n")

	y := s.atTerminal(t, nil, "checkpoint", "export", "one", file)
	y.sees(" 50% of 8.0 MiB  measure\r\n")
	y.sees("100% of 8.0 MiB  export")
	y.ends(0)
	y = s.atTerminal(t, nil, "checkpoint", "import", file)
	y.sees("100% of 8.0 MiB  send")
	y.sees("one\r\n")
	y.ends(0)
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	y = s.atTerminal(t, f, "checkpoint", "import", "-")
	y.sees("8.0 MiB  send") // of how many is not known
	y.ends(0)
}

// halfOf is a pipe in which half of a file comes, and then nothing.
func halfOf(t *testing.T, file string) io.Reader {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = in.Write(b[:len(b)/2]) }) // the other side may go first
	t.Cleanup(func() { _ = out.Close(); wg.Wait(); _ = in.Close() })
	return out
}

// Ctrl-C ends a transfer at any time, and leaves nothing, here or there.
func TestTransfersAreInterrupted(t *testing.T) {
	s := newServer(t, nil)
	whole := filepath.Join(t.TempDir(), "one.tar")
	s.run("", "checkpoint", "export", "one", whole).want(t, 0, "", "")
	for at, sees := range map[string]string{"measure": "measure", "export": "% of 8.0 MiB  export", "import": "iB  send"} {
		dir := t.TempDir()
		s.travel.holdAt.Store(at)
		args := []string{"checkpoint", "export", "one", filepath.Join(dir, "one.tar")}
		var stdin io.Reader
		if at == "import" {
			args, stdin = []string{"checkpoint", "import", "-"}, halfOf(t, whole)
		}
		y := s.atTerminal(t, stdin, args...)
		y.sees(sees)
		eventually.True(t, "the server is at it", func() bool { return s.travel.inUse.Load() == 1 })
		if _, err := io.WriteString(y.keys, "\x03"); err != nil {
			t.Fatal(err)
		}
		y.ends(130)
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 0 {
			t.Errorf("interrupted in %s: left %v, %v", at, left, err)
		}
		eventually.True(t, "the server has let go of it", func() bool { return s.travel.inUse.Load() == 0 })
		if text := y.shows.b.String(); strings.Contains(text, "barchan: ") {
			t.Errorf("interrupted in %s, it printed %q", at, text)
		}
	}
}
