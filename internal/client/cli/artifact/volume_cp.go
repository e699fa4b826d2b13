package artifact

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

func volumeCpCommand(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "cp SOURCE DESTINATION", Short: "Copy files to or from a volume",
		Long: "Copy a file, or a directory with all in it, to or from a volume, which no sandbox has to mount. One of the two is\n" +
			"VOLUME:PATH; the other is a local path, or - for standard input or output, where a file is its content. Permissions of\n" +
			"files are kept on the way in. Links, sockets and devices are left out: each is named on standard error, and the exit\n" +
			"code is 1.",
		Example: "  barchan volume cp ./corpus data:/corpus\n  barchan volume cp data:/results.csv -",
		RunE: func(cmd *cobra.Command, args []string) error {
			from, source, out := cutVolume(args[0])
			to, destination, in := cutVolume(args[1])
			if out == in {
				return app.Usage(cmd, errors.New("one of SOURCE and DESTINATION must be VOLUME:PATH, and the other a local path"))
			}
			return a.WithServer(cmd.Context(), func(t *app.Server) error {
				v, err := t.REST.Volume(cmd.Context(), from+to)
				if err != nil {
					return err
				}
				c := &volumeCopier{app: a, rest: t.REST, volume: v}
				if in {
					err = c.upload(cmd.Context(), source, destination)
				} else {
					err = c.download(cmd.Context(), source, destination)
				}
				if err == nil && c.skipped {
					return app.ExitCode(app.CodeError)
				}
				return err
			})
		},
	}
}

var volumePath = regexp.MustCompile(`(?s)^([A-Za-z0-9_-]+):(.*)$`)

// cutVolume splits VOLUME:PATH. A local path with a colon is written ./a:b.
func cutVolume(text string) (volume, p string, remote bool) {
	m := volumePath.FindStringSubmatch(text)
	if m == nil {
		return "", text, false
	}
	return m[1], path.Clean("/" + m[2]), true
}

// volumeCopier copies between this machine and one volume.
type volumeCopier struct {
	app     *app.App
	rest    *client.Client
	volume  client.Volume
	skipped bool
}

func (c *volumeCopier) skip(what string) {
	c.skipped = true
	fmt.Fprintf(c.app.Stderr, "barchan: skipped %s: it is neither a file nor a directory\n", terminal.Plain(what))
}

// into returns where a source goes: to a destination, or into one that is a directory.
func (c *volumeCopier) into(ctx context.Context, destination, name string) (string, error) {
	e, err := c.rest.VolumeStat(ctx, c.volume, destination)
	switch {
	case errors.Is(err, errs.ErrNotFound):
		return destination, nil
	case err == nil && e.Type == "directory" && name != "":
		return path.Join(destination, name), nil
	}
	return destination, err
}

func (c *volumeCopier) upload(ctx context.Context, source, destination string) error {
	if source == "-" {
		return c.rest.VolumeWrite(ctx, c.volume, destination, 0, c.app.Stdin)
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	name := filepath.Base(source)
	if name == "." || name == ".." || name == string(filepath.Separator) {
		name = "" // what is in it
	}
	to, err := c.into(ctx, destination, name)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return c.put(ctx, source, to, info)
	}
	return filepath.WalkDir(source, func(local string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(source, local)
		if err != nil {
			return err
		}
		at := path.Join(to, filepath.ToSlash(rel))
		if d.IsDir() {
			return c.rest.VolumeMakeDir(ctx, c.volume, at)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return c.put(ctx, local, at, info)
	})
}

func (c *volumeCopier) put(ctx context.Context, local, to string, info fs.FileInfo) error {
	if !info.Mode().IsRegular() {
		c.skip(local)
		return nil
	}
	f, err := os.Open(local)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return c.rest.VolumeWrite(ctx, c.volume, to, uint32(info.Mode().Perm()), f)
}

func (c *volumeCopier) download(ctx context.Context, source, destination string) error {
	e, err := c.rest.VolumeStat(ctx, c.volume, source)
	if err != nil {
		return err
	}
	if destination == "-" {
		return c.get(ctx, e, func() (io.WriteCloser, error) { return openOutput{c.app.Stdout}, nil })
	}
	if info, err := os.Stat(destination); err == nil && info.IsDir() && e.Path != "/" {
		destination = filepath.Join(destination, e.Name)
	}
	return c.fetch(ctx, e, destination)
}

// openOutput is an output that stays open.
type openOutput struct{ io.Writer }

// Close implements io.Closer.
func (openOutput) Close() error { return nil }

// fetch copies a file or a directory. Names in a volume are a sandbox's own; none has a slash, and no list has "." or "..".
func (c *volumeCopier) fetch(ctx context.Context, e client.VolumeEntry, local string) error {
	switch e.Type {
	case "file":
		return c.get(ctx, e, func() (io.WriteCloser, error) {
			return os.OpenFile(local, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, fs.FileMode(e.Mode).Perm())
		})
	case "directory":
	default:
		c.skip(e.Path)
		return nil
	}
	if err := os.MkdirAll(local, 0o755); err != nil {
		return err
	}
	list, err := c.rest.VolumeList(ctx, c.volume, e.Path)
	if err != nil {
		return err
	}
	for _, child := range list {
		if child.Name == "" || child.Name == "." || child.Name == ".." || strings.ContainsRune(child.Name, '/') {
			return fmt.Errorf("the server lists a file %q: %w", child.Name, errs.ErrInvalid)
		}
		if err := c.fetch(ctx, child, filepath.Join(local, child.Name)); err != nil {
			return err
		}
	}
	return nil
}

func (c *volumeCopier) get(ctx context.Context, e client.VolumeEntry, create func() (io.WriteCloser, error)) (err error) {
	body, err := c.rest.VolumeRead(ctx, c.volume, e.Path)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	w, err := create()
	if err != nil {
		return err
	}
	_, err = io.Copy(w, body)
	return errors.Join(err, w.Close())
}
