package artifact

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// exportedImages explains what the commands export.
const exportedImages = "The image of a template that a build made has a layer for each step, with the template's variables, directory and\n" +
	"user, and the start command as its program; the memory is not part of it."

func imageExportCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var req adminclient.ImageExport
	cmd := &cobra.Command{
		Use:   "export TEMPLATE|IMAGE FILE|-",
		Short: "Write a template or an image to a tar",
		Long: "Write a template, or an image of this server, to a tar that `docker load`, `ctr image import` and `barchan image\n" +
			"import` read: an OCI layout. - is standard output.\n\n" + exportedImages,
		Example: "  barchan image export hello hello.tar --name registry.example.com/team/hello:1\n  barchan image export hello - | docker load",
	}
	s.Flags(cmd, false)
	cmd.Flags().StringVar(&req.Name, "name", "", "name of the image in the tar (default that of the image, or barchan.local/TEMPLATE:latest)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req.Namespace, req.Source = s.Namespace, args[0]
		return exportImage(cmd.Context(), a, req, func(in io.Reader, _ func(adminclient.Event)) error {
			if args[1] == "-" {
				_, err := io.Copy(a.Stdout, in)
				return err
			}
			return writeWhole(args[1], in)
		})
	}
	return cmd
}

func imagePushCommand(a *app.App) *cobra.Command {
	var s app.Scope
	var access portable.Access
	var passwordStdin bool
	cmd := &cobra.Command{
		Use:   "push TEMPLATE|IMAGE NAME",
		Short: "Send a template or an image to a registry",
		Long: "Send a template, or an image of this server, to a registry under a name. This program does, with the password that\n" +
			"Docker's configuration of this user has, where --username is not given.\n\n" + exportedImages,
		Example: "  barchan image push hello registry.example.com/team/hello:1",
	}
	s.Flags(cmd, false)
	app.RegistryFlags(cmd, &access)
	passwordFlags(cmd, &access, &passwordStdin)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := readPassword(cmd, a, &access, passwordStdin); err != nil {
			return err
		}
		to, err := portable.ParseImage(args[1], access)
		if err != nil {
			return err
		}
		if err := to.CheckPush(cmd.Context()); err != nil {
			return err
		}
		req := adminclient.ImageExport{Namespace: s.Namespace, Source: args[0], Name: to.String()}
		pushed := ""
		err = exportImage(cmd.Context(), a, req, func(in io.Reader, progress func(adminclient.Event)) error {
			pushed, err = portable.PushTar(cmd.Context(), in, to, func(done, total int64) {
				progress(adminclient.Event{Step: "push", Done: done, Total: total, Bytes: true})
			})
			return err
		})
		if err == nil {
			fmt.Fprintln(a.Stdout, pushed)
		}
		return err
	}
	return cmd
}

// exportImage requests an image from the server, and shows the progress.
func exportImage(ctx context.Context, a *app.App, req adminclient.ImageExport, write func(in io.Reader, progress func(adminclient.Event)) error) error {
	client, err := a.Admin()
	if err != nil {
		return err
	}
	p := terminal.NewQuietProgress(a.Stderr)
	defer p.End()
	p.Event(adminclient.Event{Step: "export"})
	tar, err := client.ExportImage(ctx, req)
	if err != nil {
		return err
	}
	err = write(&terminal.CountingReader{Reader: tar, Step: "export", Report: p.Event}, p.Event)
	return errors.Join(err, tar.Close())
}
