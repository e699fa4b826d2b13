package cli

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

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/envd/processpb"
	"github.com/barchan-dev/barchan/internal/errs"
)

func (a *app) cpCommand() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files to or from a sandbox",
		Long: "Copy a file, or a directory with all in it, to or from a sandbox. One of the two is ID:PATH; the other is a local path,\n" +
			"or - for standard input or output. Directories need `tar` in the sandbox.",
		Example: "  barchan cp notes.txt i3k:/home/user/\n  barchan cp i3k:/home/user/out ./out\n  barchan cp i3k:/etc/os-release -",
		Args:    exactly("SOURCE", "DESTINATION"),
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "user to read and write as (default the template's)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		fromID, from, fromRemote := cutRemote(args[0])
		toID, to, toRemote := cutRemote(args[1])
		if fromRemote == toRemote {
			return &usageError{cmd, errors.New("one of SOURCE and DESTINATION must be ID:PATH, and the other a local path")}
		}
		if toRemote && from != "-" {
			if _, err := os.Stat(from); err != nil {
				return err
			}
		}
		return a.withTarget(cmd.Context(), func(t *target) error {
			on, err := t.running(cmd.Context(), fromID+toID, user)
			if err != nil {
				return err
			}
			c := &copier{app: a, on: on, progress: newProgress(a.stderr)}
			defer c.progress.end()
			if c.progress.tty == nil {
				c.progress.out = io.Discard // a log needs no bars of small files
			}
			if toRemote {
				return c.upload(cmd.Context(), from, to)
			}
			return c.download(cmd.Context(), from, to)
		})
	}
	return cmd
}

var remotePath = regexp.MustCompile(`^([a-z0-9]+(?:-[a-z0-9]+)*):(.*)$`)

// cutRemote takes ID:PATH apart. A local path with a colon is written ./a:b.
func cutRemote(text string) (id, p string, remote bool) {
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
	app      *app
	on       *connection
	progress *progress
}

func (c *copier) stat(ctx context.Context, p string) (*filesystempb.EntryInfo, error) {
	res, err := c.on.client.Filesystem().Stat(ctx, connect.NewRequest(&filesystempb.StatRequest{Path: p}))
	if err != nil {
		return nil, err
	}
	e := res.Msg.GetEntry()
	if e.GetType() == filesystempb.FileType_FILE_TYPE_SYMLINK && e.GetSymlinkTarget() != "" && e.GetSymlinkTarget() != p {
		return c.stat(ctx, e.GetSymlinkTarget())
	}
	return e, nil
}

// inside is the destination that cp has in mind: within to, if that is a directory.
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
	return "", c.on.lost(ctx, err)
}

func (c *copier) upload(ctx context.Context, from, to string) error {
	if from == "-" {
		_, err := c.on.client.Upload(ctx, to, c.app.stdin, nil)
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	name := filepath.Base(absFile(from))
	if to, err = c.inside(ctx, to, name); err != nil {
		return err
	}
	if info.IsDir() {
		return c.uploadDir(ctx, from, to)
	}
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	body := &countingReader{Reader: f, tell: c.progress.event, step: name, total: info.Size()}
	if _, err := c.on.client.Upload(ctx, to, body, nil); err != nil {
		return err
	}
	if info.Mode()&0o111 == 0 {
		return nil
	}
	return c.command(ctx, nil, "chmod", fmt.Sprintf("%04o", info.Mode().Perm()), to)
}

// uploadDir sends one tar, and has it unpacked in the sandbox.
func (c *copier) uploadDir(ctx context.Context, from, to string) error {
	remote := "/tmp/.barchan-cp-" + rand.Text() + ".tar"
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := packDir(w, from, c.progress)
		_ = w.CloseWithError(err) // never fails
		packed <- err
	}()
	_, err := c.on.client.Upload(ctx, remote, r, nil)
	_ = r.Close() // ends the packing if the upload did not read it all
	if packErr := <-packed; packErr != nil && !errors.Is(packErr, io.ErrClosedPipe) {
		return packErr
	}
	if err != nil {
		return err
	}
	err = c.command(ctx, nil, "mkdir", "-p", "--", to)
	if err == nil {
		err = c.command(ctx, nil, "tar", "-x", "-f", remote, "-C", to)
	}
	return errors.Join(err, c.command(context.WithoutCancel(ctx), nil, "rm", "-f", remote))
}

func (c *copier) download(ctx context.Context, from, to string) error {
	e, err := c.stat(ctx, from)
	if err != nil {
		return c.on.lost(ctx, err)
	}
	isDir := e.GetType() == filesystempb.FileType_FILE_TYPE_DIRECTORY
	if to == "-" && isDir {
		return fmt.Errorf("%s is a directory, which cannot go to standard output: %w", from, errs.ErrInvalid)
	}
	if to != "-" {
		if info, err := os.Stat(to); (err == nil && info.IsDir()) || strings.HasSuffix(to, "/") {
			to = filepath.Join(to, path.Base(e.GetPath()))
		}
	}
	if isDir {
		return c.downloadDir(ctx, from, to)
	}
	body, err := c.on.client.Download(ctx, from)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	in := &countingReader{Reader: body, tell: c.progress.event, step: e.GetName(), total: e.GetSize()}
	if to == "-" {
		_, err = io.Copy(c.app.stdout, in)
		return err
	}
	return writeFile(to, in, fs.FileMode(e.GetMode())&fs.ModePerm)
}

// writeFile puts a file in place whole or not at all.
func writeFile(to string, in io.Reader, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(to), ".barchan-cp-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(f, in)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), to)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// downloadDir reads a tar that the sandbox makes, which is not to be trusted.
func (c *copier) downloadDir(ctx context.Context, from, to string) error {
	r, w := io.Pipe()
	unpacked := make(chan error, 1)
	go func() {
		err := unpackDir(r, to, c.progress)
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

// command runs a program in the sandbox; its output goes to out, if not nil,
// and what it complains of becomes the error.
func (c *copier) command(ctx context.Context, out io.Writer, argv ...string) error {
	no := false
	stream, err := c.on.client.Process().Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:]}, Stdin: &no,
	}))
	if err != nil {
		return fmt.Errorf("%s in the sandbox: %w", argv[0], c.on.lost(ctx, err))
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
			if code := exitCodeOf(end); code != 0 {
				return fmt.Errorf("%s in the sandbox: exit code %d: %s", argv[0], code, strings.TrimSpace(complaint.String()))
			}
			return nil
		}
	}
	return fmt.Errorf("%s in the sandbox: %w", argv[0], c.on.lost(ctx, stream.Err()))
}
