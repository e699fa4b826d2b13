package cli

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
)

func (a *app) imageCommand() *cobra.Command {
	return nounCommand("image", "Images that sandboxes run",
		a.imageBuildCommand(), a.imagePullCommand(), a.imageImportCommand(), a.imageLsCommand(), a.imageRmCommand())
}

// imageWork runs a server operation with progress, and prints the resulting images.
func (a *app) imageWork(work func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error)) error {
	client, err := a.admin()
	if err != nil {
		return err
	}
	p := newProgress(a.stderr)
	result, err := work(client, p.event)
	p.end()
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(result.Images)
	}
	for _, i := range result.Images {
		fmt.Fprintln(a.stdout, i.Ref)
	}
	return nil
}

func (a *app) imageBuildCommand() *cobra.Command {
	var req adminclient.BuildBaseRequest
	base := &cobra.Command{
		Use:   "base",
		Short: "Make the base image from the distribution's packages",
		Long: "Make the base image from Debian's packages, with Node.js from the npm registry, unless it is there.\n" +
			"No registry of images is needed.\n" +
			"Warm sandboxes with an older base image are replaced; others, and checkpoints, keep theirs.",
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.imageWork(func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error) {
				return c.BuildBase(cmd.Context(), req, progress)
			})
		},
	}
	base.Flags().BoolVar(&req.Force, "force", false, "make it again")
	a.jsonFlag(base)
	return nounCommand("build", "Make an image", base)
}

func (a *app) imagePullCommand() *cobra.Command {
	var access portable.Access
	var passwordStdin bool
	cmd := &cobra.Command{
		Use:   "pull IMAGE",
		Short: "Fetch an image from its registry",
		Long: "Fetch an image from its registry. The server does, by the authorities that its system trusts; with --ca-file or\n" +
			"--plain-http this program does, and hands the image to the server. Docker's configuration of this user then has the\n" +
			"password, where --username is not given.",
		Example: "  barchan image pull docker.io/library/debian:stable-slim\n  barchan image pull registry.example.com/team/app:1 --ca-file ca.pem",
		Args:    exactly("IMAGE"),
	}
	registryFlags(cmd, &access)
	cmd.Flags().StringVar(&access.Username, "username", "", "user of the registry; its password is asked for")
	cmd.Flags().BoolVar(&passwordStdin, "password-stdin", false, "read the password from standard input")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if passwordStdin && access.Username == "" {
			return &usageError{cmd, errors.New("--password-stdin needs --username")}
		}
		if access.Username != "" {
			var err error
			if access.Password, err = a.password(cmd.Context(), passwordStdin); err != nil {
				return err
			}
		}
		return a.imageWork(func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error) {
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
	in := &countingReader{Reader: tar, step: "pull", total: l.Size(), tell: progress}
	result, err := c.Import(ctx, in, ref, progress)
	// The source's error is more precise than the receiver's.
	if why := done(); why != nil {
		err = why
	}
	return result, err
}

func (a *app) password(ctx context.Context, fromStdin bool) (string, error) {
	if fromStdin {
		in, err := a.standardInput(ctx)
		if err != nil {
			return "", err
		}
		line, err := bufio.NewReader(io.LimitReader(in, 64<<10)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("read the password: %w", err)
		}
		return strings.TrimRight(line, "\r\n"), nil
	}
	f, ok := a.stdin.(*os.File)
	if !ok || !isTerminal(f) {
		return "", fmt.Errorf("nobody is here to ask for the password; add --password-stdin: %w", errs.ErrInvalid)
	}
	fmt.Fprint(a.stderr, "Password: ")
	b, err := readPassword(ctx, int(f.Fd()))
	fmt.Fprintln(a.stderr)
	if err != nil {
		return "", fmt.Errorf("read the password: %w", err)
	}
	return string(bytes.TrimSpace(b)), nil
}

func (a *app) imageImportCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:     "import FILE",
		Short:   "Take images from a tar: an OCI layout, or what `docker save` makes",
		Long:    "Take images from a tar: an OCI layout, or what `docker save` makes. - is standard input.",
		Example: "  barchan image import app.tar\n  docker save app | barchan image import -",
		Args:    exactly("FILE"),
	}
	cmd.Flags().StringVar(&name, "name", "", "name of an image that has none in the tar")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f, err := a.open(cmd.Context(), args[0])
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
		return a.imageWork(func(c *adminclient.Client, progress func(adminclient.Event)) (adminclient.Result, error) {
			var in io.Reader = f
			if total > 0 {
				in = &countingReader{Reader: f, step: "send", total: total, tell: progress}
			}
			return c.Import(cmd.Context(), in, name, progress)
		})
	}
	return cmd
}

func (a *app) imageLsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List images",
		Args:  exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			return a.printImages(cmd.Context(), client)
		},
	}
	a.listFlags(cmd)
	return cmd
}

func (a *app) printImages(ctx context.Context, client *adminclient.Client) error {
	list, err := client.Images(ctx)
	if err != nil {
		return err
	}
	return printList(a, columns[adminclient.Image]{
		header: []string{"IMAGE", "DIGEST", "SIZE", "AGE"},
		row: func(i *adminclient.Image) []string {
			digest := strings.TrimPrefix(i.Digest, "sha256:")
			if a.format != formatWide {
				digest = digest[:min(12, len(digest))]
			}
			return []string{i.Ref, digest, size(i.Size), since(i.CreatedAt)}
		},
	}, list)
}

func (a *app) imageRmCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Remove images",
		Long:  "Remove images. One that sandboxes or checkpoints need is refused; one that templates name needs --force.",
		Args:  atLeast("IMAGE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			var failed []error
			for _, ref := range args {
				if err := client.RemoveImage(cmd.Context(), ref, force); err != nil {
					failed = append(failed, err)
					continue
				}
				fmt.Fprintln(a.stdout, ref)
			}
			return errors.Join(failed...)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "remove also what templates name: their sandboxes pull it again, or fail")
	return cmd
}
