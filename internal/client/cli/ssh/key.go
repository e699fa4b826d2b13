package ssh

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// maxKeyFile bounds what is read of a file of public keys, in bytes.
const maxKeyFile = 1 << 20

// KeyCommand returns `barchan ssh-key`.
func KeyCommand(a *app.App) *cobra.Command {
	return app.NounCommand("ssh-key", "Public keys for SSH into sandboxes", keyAddCommand(a), keyLsCommand(a), keyRmCommand(a))
}

func keyAddCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "add FILE",
		Short: "Let the holder of a key into the namespace's sandboxes",
		Long: "Add the public keys of a file, such as ~/.ssh/id_ed25519.pub, or of standard input (-), to the API\n" +
			"key in use. They open the sandboxes of its namespace over SSH, until they or the API key are\n" +
			"removed, or it expires.",
		Example: "  barchan ssh-key add ~/.ssh/id_ed25519.pub\n  ssh-add -L | barchan ssh-key add -",
	}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		lines, err := readKeys(ctx, a, args[0])
		if err != nil {
			return err
		}
		return a.WithServer(ctx, func(t *app.Server) error {
			added := make([]client.SSHKey, 0, len(lines))
			for _, line := range lines {
				k, err := t.REST.AddSSHKey(ctx, line)
				if err != nil {
					return err
				}
				added = append(added, k)
				if !a.JSON {
					fmt.Fprintln(a.Stdout, k.Fingerprint)
				}
			}
			if a.JSON {
				return a.PrintJSON(added)
			}
			return nil
		})
	}
	return cmd
}

// readKeys returns the lines of a file that have keys.
func readKeys(ctx context.Context, a *app.App, file string) (lines []string, err error) {
	f, err := a.Open(ctx, file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(io.LimitReader(f, maxKeyFile))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	if strings.Contains(string(text), "PRIVATE KEY") {
		return nil, fmt.Errorf("%s has a private key, which must not leave this machine; give the file with .pub at its end: %w", file, errs.ErrInvalid)
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		return nil, fmt.Errorf("%s has no public key: %w", file, errs.ErrInvalid)
	}
	return lines, nil
}

func keyLsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the keys of the API key in use",
	}
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			keys, err := t.REST.SSHKeys(cmd.Context())
			if err != nil {
				return err
			}
			return app.PrintList(a, app.Columns[client.SSHKey]{
				Header: []string{"FINGERPRINT", "COMMENT"}, None: "no SSH keys; `barchan ssh-key add FILE` adds those of a file",
				Row: func(k *client.SSHKey) []string { return []string{k.Fingerprint, k.Comment} },
			}, keys)
		})
	}
	return cmd
}

func keyRmCommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:     "rm FINGERPRINT...",
		Aliases: []string{"remove", "delete"},
		Short:   "Remove keys; they are refused from then on",
		Args:    app.AtLeast("FINGERPRINT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithServer(cmd.Context(), func(t *app.Server) error {
				return a.Each(args, func(fingerprint string) (string, error) {
					return fingerprint, t.REST.DeleteSSHKey(cmd.Context(), fingerprint)
				})
			})
		},
	})
}
