package artifact

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

func snapshotExportCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var req adminclient.CheckpointExport
	var access portable.Access
	cmd := &cobra.Command{
		Use:   "export SNAPSHOT FILE|-|" + portable.Scheme + "HOST/REPOSITORY:TAG",
		Short: "Write a snapshot to a tar or a registry",
		Long: "Write a snapshot, memory and files, as an OCI artifact: a tar with an image layout in it, or the same in a registry,\n" +
			"for which Docker's configuration of this user has the password. - is standard output. Its memory holds all\n" +
			"secrets of the sandbox, such as keys and passwords.",
		Example: "  barchan snapshot export build:1 build-1.tar\n  barchan snapshot export build:1 oci://registry.example.com/team/build:1",
	}
	s.Flags(cmd, false)
	cmd.Flags().BoolVar(&req.WithoutImage, "without-image", false, "leave out the base image; the importing server must have it")
	cmd.Flags().BoolVar(&req.AllowSecrets, "allow-secrets", false, "also a snapshot that holds the variables of a claim")
	app.RegistryFlags(cmd, &access)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var to portable.Place
		inRegistry := strings.HasPrefix(args[1], portable.Scheme)
		if inRegistry {
			var err error
			if to, err = portable.ParsePlace(args[1], access); err != nil {
				return err
			}
			if err := to.CheckPush(cmd.Context()); err != nil {
				return err
			}
		}
		req.Namespace, req.Name = s.Namespace, args[0]
		if k, err := a.Kube(cmd.Context()); err == nil { // otherwise only the object's name is known
			if req.Name, err = k.SnapshotObject(cmd.Context(), s.Namespace, args[0]); err != nil {
				return err
			}
		}
		return exported(cmd.Context(), a, req, func(in io.Reader) error {
			switch {
			case inRegistry:
				return push(cmd.Context(), in, to)
			case args[1] == "-":
				_, err := io.Copy(a.Stdout, in)
				return err
			default:
				return writeWhole(args[1], in)
			}
		})
	}
	return cmd
}

// exported requests an export from the server, and shows the progress.
func exported(ctx context.Context, a *app.App, req adminclient.CheckpointExport, write func(io.Reader) error) error {
	client, err := a.Admin()
	if err != nil {
		return err
	}
	p := terminal.NewQuietProgress(a.Stderr)
	defer p.End()
	p.Event(adminclient.Event{Step: "measure"})
	tar, err := client.ExportCheckpoint(ctx, req, p.Event)
	if errors.Is(err, errs.ErrForbidden) && !req.AllowSecrets {
		return fmt.Errorf("%w (--allow-secrets)", err)
	} else if err != nil {
		return err
	}
	for _, w := range tar.Warnings {
		p.End()
		fmt.Fprintln(a.Stderr, "warning: "+terminal.Plain(w))
	}
	err = write(&terminal.CountingReader{Reader: tar, Step: "export", Total: tar.Size, Report: p.Event})
	return errors.Join(err, tar.Close())
}

func push(ctx context.Context, in io.Reader, to portable.Place) error {
	r, err := portable.Read(in)
	if err != nil {
		return err
	}
	return portable.Push(ctx, r, to)
}

// writeWhole writes a file atomically from a reader. An existing file is replaced only at the end.
func writeWhole(path string, in io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, in)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

func snapshotImportCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var req adminclient.CheckpointImport
	var access portable.Access
	cmd := &cobra.Command{
		Use:   "import FILE|-|" + portable.Scheme + "HOST/REPOSITORY:TAG",
		Short: "Make a snapshot of what `snapshot export` wrote",
		Long: "Make a snapshot of what `snapshot export` wrote, in a file, in a registry, or, for -, on standard input. All of it is\n" +
			"checked against its digests. The base image comes with it, where it is part of it and not here. What is imported runs as\n" +
			"any sandbox does; take images and memory only from those whom you trust with what you do in it.",
		Example: "  barchan snapshot import build-1.tar --name build\n  ssh other barchan snapshot export build:1 - | barchan snapshot import -",
	}
	s.Flags(cmd, false)
	cmd.Flags().StringVar(&req.Name, "name", "", "name of the snapshot here (default the one that it was exported under)")
	app.RegistryFlags(cmd, &access)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req.Namespace = s.Namespace
		in, total, done, err := openArtifact(cmd.Context(), a, args[0], access)
		if err != nil {
			return err
		}
		made, err := imported(cmd.Context(), a, req, in, total)
		// The source's error is more precise than the receiver's.
		if why := done(); why != nil {
			err = why
		}
		if err != nil {
			return err
		}
		return a.Result(made, made.Name)
	}
	return cmd
}

// openArtifact reads an artifact as a tar in the server's order. After the last read, done returns the
// error of writing the tar.
func openArtifact(ctx context.Context, a *app.App, from string, access portable.Access) (in io.Reader, size int64, done func() error, err error) {
	var l *portable.Layout
	var f *os.File
	switch {
	case from == "-":
		in, err = a.StandardInput(ctx)
		return in, 0, func() error { return nil }, err
	case strings.HasPrefix(from, portable.Scheme):
		var place portable.Place
		if place, err = portable.ParsePlace(from, access); err == nil {
			l, err = portable.Pull(ctx, place)
		}
	default:
		if f, err = os.Open(from); err != nil {
			return nil, 0, nil, err
		}
		var info os.FileInfo
		if info, err = f.Stat(); err == nil {
			l, err = portable.OpenFile(ctx, f, info.Size())
		}
	}
	if err != nil {
		if f != nil {
			_ = f.Close()
		}
		return nil, 0, nil, err
	}
	in, made := tarOf(ctx, l)
	return in, l.Size(), func() error {
		err := made()
		if f != nil {
			_ = f.Close()
		}
		return err
	}, nil
}

// tarOf writes a tar while it is read. After the last read, done returns the error of writing it.
func tarOf(ctx context.Context, l *portable.Layout) (in io.Reader, done func() error) {
	out, into := io.Pipe()
	var writer errgroup.Group
	writer.Go(func() error {
		buffered := bufio.NewWriterSize(into, 1<<20)
		err := l.Write(ctx, buffered)
		if err == nil {
			err = buffered.Flush()
		}
		_ = into.CloseWithError(err)
		return err
	})
	return out, func() error {
		_ = out.CloseWithError(errRead)
		err := writer.Wait()
		if errors.Is(err, errRead) {
			return nil
		}
		return err
	}
}

// errRead ends the writing of a tar that is no longer read.
var errRead = errors.New("it is read no further")

func imported(ctx context.Context, a *app.App, req adminclient.CheckpointImport, in io.Reader, total int64) (adminclient.Imported, error) {
	client, err := a.Admin()
	if err != nil {
		return adminclient.Imported{}, err
	}
	p := terminal.NewQuietProgress(a.Stderr)
	defer p.End()
	counted := &terminal.CountingReader{Reader: in, Step: "send", Total: total, Report: p.Event}
	made, err := client.ImportCheckpoint(ctx, req, counted, func(adminclient.Event) {})
	for _, w := range made.Warnings {
		p.End()
		fmt.Fprintln(a.Stderr, "warning: "+terminal.Plain(w))
	}
	return made, err
}
