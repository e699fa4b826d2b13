package artifact

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// ImageCommand returns `barchan image`.
func ImageCommand(a *app.App) *cobra.Command {
	return app.NounCommand("image", "Images that sandboxes run",
		imageBuildCommand(a), imagePullCommand(a), imageImportCommand(a), imageLsCommand(a), imageRmCommand(a), imagePruneCommand(a),
		imageExportCommand(a), imagePushCommand(a))
}

// imageWork runs a server operation with progress, and prints the resulting images.
func imageWork(a *app.App, work func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error)) error {
	client, err := a.Admin()
	if err != nil {
		return err
	}
	p := terminal.NewProgress(a.Stderr)
	result, err := work(client, p.Event)
	p.End()
	if err != nil {
		return err
	}
	if a.JSON {
		return a.PrintJSON(result.Images)
	}
	for _, i := range result.Images {
		fmt.Fprintln(a.Stdout, i.Ref)
	}
	return nil
}

func imageBuildCommand(a *app.App) *cobra.Command {
	base := imageBuildOf(a, adminclient.ImageBase)
	base.Short = "Make the base image from the distribution's packages"
	base.Long = "Make the base image from Debian's packages, with Node.js from the npm registry, unless it is there.\n" +
		"No registry of images is needed.\n" +
		"Warm sandboxes with an older base image are replaced; others, and checkpoints, keep theirs."
	code := imageBuildOf(a, adminclient.ImageInterpreter)
	code.Short = "Make the code interpreter: its image, template and pool"
	code.Long = "Make the code interpreter of E2B's SDK: an image from Debian's packages, with Python, R and Node.js, unless it is there;\n" +
		"template code-interpreter-v1, which all namespaces may use; and a pool of it, whose sandboxes start with kernels.\n" +
		"A template that exists gets the new image. Sandboxes that run, and checkpoints, keep theirs."
	return app.NounCommand("build", "Make an image", base, code)
}

func imageBuildOf(a *app.App, image string) *cobra.Command {
	req := adminclient.BuildImageRequest{Image: image}
	cmd := &cobra.Command{
		Use: image,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return imageWork(a, func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error) {
				return c.BuildImage(cmd.Context(), req, progress)
			})
		},
	}
	cmd.Flags().BoolVar(&req.Force, "force", false, "make it again")
	a.JSONFlag(cmd)
	return cmd
}

func imagePullCommand(a *app.App) *cobra.Command {
	var access portable.Access
	var passwordStdin bool
	cmd := &cobra.Command{
		Use:   "pull IMAGE",
		Short: "Fetch an image from its registry",
		Long: "Fetch an image from its registry. The server does, by the authorities that its system trusts; with --ca-file or\n" +
			"--plain-http this program does, and hands the image to the server. Docker's configuration of this user then has the\n" +
			"password, where --username is not given.",
		Example: "  barchan image pull docker.io/library/debian:stable-slim\n  barchan image pull registry.example.com/team/app:1 --ca-file ca.pem",
	}
	app.RegistryFlags(cmd, &access)
	passwordFlags(cmd, &access, &passwordStdin)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := readPassword(cmd, a, &access, passwordStdin); err != nil {
			return err
		}
		return imageWork(a, func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error) {
			if access.CAFile != "" || access.PlainHTTP {
				return pullHere(cmd.Context(), c, args[0], access, progress)
			}
			return c.Pull(cmd.Context(), adminclient.PullRequest{Ref: args[0], Username: access.Username, Password: access.Password}, progress)
		})
	}
	return cmd
}

// pullHere pulls an image with this program's credentials, and imports it into the server.
func pullHere(ctx context.Context, c *adminclient.Client, ref string, access portable.Access, progress func(adminclient.Event)) (adminclient.Result, error) {
	from, err := portable.ParseImage(ref, access)
	if err != nil {
		return adminclient.Result{}, err
	}
	l, err := portable.PullImage(ctx, from)
	if err != nil {
		return adminclient.Result{}, err
	}
	tar, done := tarOf(ctx, l)
	in := &terminal.CountingReader{Reader: tar, Step: "pull", Total: l.Size(), Report: progress}
	result, err := c.Import(ctx, in, ref, progress)
	// The source's error is more precise than the receiver's.
	if why := done(); why != nil {
		err = why
	}
	return result, err
}

func passwordFlags(cmd *cobra.Command, access *portable.Access, fromStdin *bool) {
	cmd.Flags().StringVar(&access.Username, "username", "", "user of the registry; the password is prompted for")
	cmd.Flags().BoolVar(fromStdin, "password-stdin", false, "read the password from standard input")
}

// readPassword reads the password of the user that a command names, if it does.
func readPassword(cmd *cobra.Command, a *app.App, access *portable.Access, fromStdin bool) (err error) {
	switch {
	case access.Username != "":
		access.Password, err = password(cmd.Context(), a, fromStdin)
		return err
	case fromStdin:
		return app.Usage(cmd, errors.New("--password-stdin needs --username"))
	default:
		return nil
	}
}

func password(ctx context.Context, a *app.App, fromStdin bool) (string, error) {
	if fromStdin {
		in, err := a.StandardInput(ctx)
		if err != nil {
			return "", err
		}
		line, err := bufio.NewReader(io.LimitReader(in, 64<<10)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("read the password: %w", err)
		}
		return strings.TrimRight(line, "\r\n"), nil
	}
	f, ok := a.Stdin.(*os.File)
	if !ok || !terminal.IsTerminal(f) {
		return "", fmt.Errorf("standard input is not a terminal to read the password from; add --password-stdin: %w", errs.ErrInvalid)
	}
	fmt.Fprint(a.Stderr, "Password: ")
	b, err := app.ReadPassword(ctx, int(f.Fd()))
	fmt.Fprintln(a.Stderr)
	if err != nil {
		return "", fmt.Errorf("read the password: %w", err)
	}
	return string(bytes.TrimSpace(b)), nil
}

func imageImportCommand(a *app.App) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:     "import FILE",
		Short:   "Take images from a tar: an OCI layout, or what `docker save` makes",
		Long:    "Take images from a tar: an OCI layout, or what `docker save` makes. - is standard input.",
		Example: "  barchan image import app.tar\n  docker save app | barchan image import -",
	}
	cmd.Flags().StringVar(&name, "name", "", "name of an image that has none in the tar")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f, err := a.Open(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		total := int64(0)
		if file, ok := f.(*os.File); ok {
			info, err := file.Stat()
			if err != nil {
				return err
			}
			total = info.Size()
		}
		return imageWork(a, func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error) {
			var in io.Reader = f
			if total > 0 {
				in = &terminal.CountingReader{Reader: f, Step: "send", Total: total, Report: progress}
			}
			return c.Import(cmd.Context(), in, name, progress)
		})
	}
	return cmd
}

func imageLsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List images",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithAdmin(func(c *adminclient.Client) error { return printImages(cmd.Context(), a, c) })
		},
	}
	a.ListFlags(cmd)
	return cmd
}

func printImages(ctx context.Context, a *app.App, client *adminclient.Client) error {
	list, err := client.Images(ctx)
	if err != nil {
		return err
	}
	return app.PrintList(a, app.Columns[adminclient.Image]{
		Header: []string{"IMAGE", "DIGEST", "SIZE", "AGE", "LAST USED", "ORIGIN"},
		Row: func(i *adminclient.Image) []string {
			digest := strings.TrimPrefix(i.Digest, "sha256:")
			if a.Format != app.FormatWide {
				digest = digest[:min(12, len(digest))]
			}
			return []string{i.Ref, digest, terminal.Size(i.Size), terminal.Since(i.CreatedAt), terminal.Since(i.LastUsed), origin(i)}
		},
	}, list)
}

// origin says where an image is from.
func origin(i *adminclient.Image) string {
	switch {
	case i.Private:
		return "private"
	case i.Pulled:
		return "pulled"
	default:
		return "local"
	}
}

func imagePruneCommand(a *app.App) *cobra.Command {
	var req adminclient.PruneRequest
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove images that nothing uses",
		Long: "Remove the pulled images that no sandbox, checkpoint, template or unfinished build uses, and print them.\n" +
			"The server does so itself when images exceed the setting imageStore. Imported images and those made here\n" +
			"stay without --all, for no registry has them.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithAdmin(func(c *adminclient.Client) error {
				gone, err := c.Prune(cmd.Context(), req)
				if err != nil {
					return err
				}
				if a.JSON {
					return a.PrintJSON(gone)
				}
				if len(gone) == 0 {
					fmt.Fprintln(a.Stderr, "no images to remove")
				}
				for _, i := range gone {
					fmt.Fprintln(a.Stdout, i.Ref)
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&req.All, "all", false, "remove also images that were imported or made here")
	a.JSONFlag(cmd)
	return cmd
}

func imageRmCommand(a *app.App) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Remove images",
		Long:  "Remove images. One that sandboxes or checkpoints need is refused; one that templates name needs --force.",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithAdmin(func(c *adminclient.Client) error {
				return a.Each(args, func(ref string) (string, error) {
					err := c.RemoveImage(cmd.Context(), ref, force)
					if errors.Is(err, errs.ErrNotFound) {
						err = errs.Public(err, fmt.Sprintf("image %q not found; `barchan image ls` lists them", ref))
					}
					return ref, err
				})
			})
		},
	}
	a.JSONFlag(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "remove also what templates name: their sandboxes pull it again, or fail")
	return cmd
}
