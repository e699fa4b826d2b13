// Package files has `barchan cp`, which copies files into a sandbox and out of it. An archive of a sandbox never changes a file outside of the
// directory it is unpacked to.
package files

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/files/dirtar"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// CpCommand returns `barchan cp`.
func CpCommand(a *app.App) *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files to or from a sandbox",
		Long: "Copy a file, or a directory with all in it, to or from a sandbox. One of the two is SANDBOX:PATH; the other is a local\n" +
			"path, or - for standard input or output. There a file is its content, and a directory is a tar archive of it: what goes\n" +
			"to a directory from standard input is unpacked in it. Directories need `tar` in the sandbox.\n\n" +
			"Modes, modification times and symbolic links are kept; files belong to the user who writes them. Sockets, devices and\n" +
			"FIFOs are left out: each is named on standard error, and the exit code is 1.",
		Example: "  barchan cp notes.txt i3k:/home/user/\n  barchan cp i3k:/home/user/out ./out\n  barchan cp i3k:/etc/os-release -\n" +
			"  barchan cp i3k:/srv/data - | barchan cp - i4m:/srv",
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "user to read and write as (default the template's)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		fromID, from, fromRemote := CutRemote(args[0])
		toID, to, toRemote := CutRemote(args[1])
		if fromRemote == toRemote {
			return app.Usage(cmd, errors.New("one of SOURCE and DESTINATION must be SANDBOX:PATH, and the other a local path"))
		}
		if toRemote && from != "-" {
			if _, err := os.Stat(from); err != nil {
				return err
			}
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			on, err := t.Running(cmd.Context(), fromID+toID, user)
			if err != nil {
				return err
			}
			c := &copier{app: a, on: on, progress: terminal.NewProgress(a.Stderr)}
			defer c.progress.End()
			if c.progress.TTY == nil {
				c.progress.Out = io.Discard // no progress lines for small files
			}
			copying := c.download
			if toRemote {
				copying = c.upload
			}
			if err := copying(cmd.Context(), from, to); err != nil {
				return err
			}
			if c.skipped.Load() {
				return app.ExitCode(app.CodeError)
			}
			return nil
		})
	}
	return cmd
}

var remotePath = regexp.MustCompile(`(?s)^([a-z0-9]+(?:[-.][a-z0-9]+)*):(.*)$`)

// CutRemote splits SANDBOX:PATH. A local path with a colon is written ./a:b.
func CutRemote(text string) (id, p string, remote bool) {
	m := remotePath.FindStringSubmatch(text)
	if m == nil {
		return "", text, false
	}
	if m[2] == "" {
		m[2] = "."
	}
	return m[1], m[2], true
}

// copier copies between this machine and one sandbox.
type copier struct {
	app      *app.App
	on       *app.Sandbox
	progress *terminal.Progress
	skipped  atomic.Bool // some files were skipped, and reported
}

// skip reports a file that is not copied.
func (c *copier) skip(what, why string) {
	c.skipped.Store(true)
	c.progress.End()
	fmt.Fprintf(c.app.Stderr, "barchan: skipped %s: %s\n", terminal.Plain(what), terminal.Plain(why))
}

// events shows the progress of a step.
func (c *copier) events(step string) dirtar.Events {
	return dirtar.Events{Entry: func(name string) { c.progress.Event(adminclient.Event{Step: step, Message: name}) }, Skip: c.skip}
}

// maxLinks bounds how many links are followed in a row, as on Linux.
const maxLinks = 40

// stat describes the target of a path.
func (c *copier) stat(ctx context.Context, p string) (*filesystempb.EntryInfo, error) {
	at := p
	for range maxLinks {
		res, err := c.on.Client.Filesystem().Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: at}))
		if err != nil {
			return nil, err
		}
		e := res.Msg.GetEntry()
		if e.GetType() != filesystempb.FileType_FILE_TYPE_SYMLINK || e.GetSymlinkTarget() == "" {
			return e, nil
		}
		at = e.GetSymlinkTarget()
	}
	return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%s: %w", p, syscall.ELOOP))
}

// inside returns the destination as cp does: within to, if that is a directory.
func (c *copier) inside(ctx context.Context, to, name string) (string, error) {
	e, err := c.stat(ctx, to)
	switch {
	case err == nil && e.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY:
		return path.Join(to, name), nil
	case err == nil, envd.IsCode(err, connect.CodeNotFound):
		if strings.HasSuffix(to, "/") {
			return path.Join(to, name), nil
		}
		return to, nil
	}
	return "", c.on.Lost(ctx, err)
}

func (c *copier) upload(ctx context.Context, from, to string) error {
	if from == "-" {
		return c.uploadInput(ctx, to)
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	name := filepath.Base(app.AbsFile(from))
	if to, err = c.inside(ctx, to, name); err != nil {
		return err
	}
	if info.IsDir() {
		return c.uploadTar(ctx, to, func(w io.Writer) error { return dirtar.Pack(w, from, c.events("send")) })
	}
	if why := dirtar.Uncopied(info.Mode()); why != "" {
		c.skip(from, why)
		return nil
	}
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	body := &terminal.CountingReader{Reader: f, Report: c.progress.Event, Step: name, Total: info.Size()}
	if _, err := c.on.Client.Upload(ctx, to, body, nil); err != nil {
		return c.on.Lost(ctx, err)
	}
	// Not every touch supports fractions of a second.
	err = c.command(ctx, nil, "sh", "-c", `chmod "$1" "$4" && { touch -m -d "@$2.$3" "$4" 2>/dev/null || touch -m -d "@$2" "$4"; }`, "sh",
		fmt.Sprintf("%04o", info.Mode().Perm()), fmt.Sprint(info.ModTime().Unix()), fmt.Sprintf("%09d", info.ModTime().Nanosecond()), to)
	if start, ok := errors.AsType[*app.StartError](err); ok {
		c.progress.End()
		fmt.Fprintf(c.app.Stderr, "barchan: mode and modification time of %s are not kept: %s\n", terminal.Plain(from), terminal.Plain(start.Error()))
		return nil
	}
	return err
}

// uploadInput copies standard input, which is a tar if the destination is a directory.
func (c *copier) uploadInput(ctx context.Context, to string) error {
	in, err := c.app.StandardInput(ctx)
	if err != nil {
		return err
	}
	e, err := c.stat(ctx, to)
	if err != nil && !envd.IsCode(err, connect.CodeNotFound) {
		return c.on.Lost(ctx, err)
	}
	if e.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY || strings.HasSuffix(to, "/") {
		return c.uploadTar(ctx, to, func(w io.Writer) error {
			_, err := io.Copy(w, in)
			return err
		})
	}
	if _, err := c.on.Client.Upload(ctx, to, in, nil); err != nil {
		return c.on.Lost(ctx, err)
	}
	return nil
}

// uploadTar sends the tar that pack writes, and unpacks it in a directory of the sandbox.
func (c *copier) uploadTar(ctx context.Context, to string, pack func(io.Writer) error) error {
	remote := "/tmp/.barchan-cp-" + rand.Text() + ".tar"
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := pack(w)
		_ = w.CloseWithError(err) // never fails
		packed <- err
	}()
	_, err := c.on.Client.Upload(ctx, remote, r, nil)
	_ = r.Close() // ends pack if the upload did not read it all
	if packErr := <-packed; packErr != nil && !errors.Is(packErr, io.ErrClosedPipe) {
		return packErr
	}
	if err != nil {
		return c.on.Lost(ctx, err)
	}
	err = c.command(ctx, nil, "mkdir", "-p", "--", to)
	if err == nil {
		err = c.command(ctx, nil, "tar", "-x", "-p", "-o", "-f", remote, "-C", to)
	}
	return errors.Join(err, c.command(context.WithoutCancel(ctx), nil, "rm", "-f", remote))
}

func (c *copier) download(ctx context.Context, from, to string) error {
	e, err := c.stat(ctx, from)
	if err != nil {
		return c.on.Lost(ctx, err)
	}
	isDir := e.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY
	switch {
	case isDir && to == "-":
		return c.command(ctx, c.app.Stdout, "tar", "-c", "-f", "-", "-C", path.Dir(e.GetPath()), "./"+path.Base(e.GetPath()))
	case e.GetType() == filesystempb.FileType_FILE_TYPE_UNSPECIFIED:
		c.skip(from, "neither a file nor a directory")
		return nil
	}
	if to != "-" {
		if info, err := os.Stat(to); (err == nil && info.IsDir()) || strings.HasSuffix(to, "/") {
			to = filepath.Join(to, path.Base(e.GetPath()))
		}
	}
	if isDir {
		return c.downloadDir(ctx, from, to)
	}
	body, err := c.on.Client.Download(ctx, from)
	if err != nil {
		return c.on.Lost(ctx, err)
	}
	defer func() { _ = body.Close() }()
	in := &terminal.CountingReader{Reader: body, Report: c.progress.Event, Step: e.GetName(), Total: e.GetSize()}
	if to == "-" {
		_, err = io.Copy(c.app.Stdout, in)
		return err
	}
	return writeFile(to, in, fs.FileMode(e.GetMode())&fs.ModePerm, e.GetModifiedTime().AsTime())
}

// writeFile writes a file atomically.
func writeFile(to string, in io.Reader, mode fs.FileMode, modified time.Time) error {
	f, err := os.CreateTemp(filepath.Dir(to), ".barchan-cp-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, in)
	err = errors.Join(err, f.Chmod(mode), f.Close(), os.Chtimes(f.Name(), time.Time{}, modified))
	if err == nil {
		err = os.Rename(f.Name(), to)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// downloadDir reads a tar from the sandbox, which is untrusted.
func (c *copier) downloadDir(ctx context.Context, from, to string) error {
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := dirtar.Unpack(r, to, c.events("receive"))
		_ = r.CloseWithError(err) // never fails
		unpacked <- err
	}()
	err := c.command(ctx, w, "tar", "-c", "-f", "-", "-C", from, ".")
	_ = w.CloseWithError(err) // never fails
	if unpackErr := <-unpacked; unpackErr != nil && !errors.Is(unpackErr, err) {
		return unpackErr
	}
	return err
}

// command runs a program in the sandbox; its output goes to out, if not nil, and its stderr becomes
// the error, or is shown if it succeeds.
func (c *copier) command(ctx context.Context, out io.Writer, argv ...string) error {
	no := false
	stream, err := c.on.Client.Process().Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{
			Cmd: argv[0], Args: argv[1:],
			Envs: map[string]string{"TAR_OPTIONS": "--format=posix"}, // GNU's default has whole seconds; others ignore it
		},
		Stdin: &no,
	}))
	if err != nil {
		return fmt.Errorf("%s in the sandbox: %w", argv[0], c.on.Lost(ctx, err))
	}
	defer func() { _ = stream.Close() }()
	var complaint strings.Builder
	for stream.Receive() {
		e := stream.Msg().GetEvent()
		if data := e.GetData(); data != nil {
			if b := data.GetStdout(); len(b) > 0 && out != nil {
				if _, err := out.Write(b); err != nil {
					return err
				}
			}
			complaint.Write(data.GetStderr()[:min(len(data.GetStderr()), max(0, 4096-complaint.Len()))])
		}
		if end := e.GetEnd(); end != nil {
			if code := envd.ExitCode(end); code != 0 {
				return fmt.Errorf("%s in the sandbox: exit code %d: %s", argv[0], code, strings.TrimSpace(complaint.String()))
			}
			for line := range strings.Lines(complaint.String()) { // tar names sockets
				c.skip("in the sandbox", strings.TrimSuffix(line, "\n"))
			}
			return nil
		}
	}
	return fmt.Errorf("%s in the sandbox: %w", argv[0], c.on.Lost(ctx, stream.Err()))
}
