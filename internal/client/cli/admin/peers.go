package admin

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// PeersCommand returns `barchan peers`.
func PeersCommand(a *app.App) *cobra.Command {
	return app.NounCommand("peers", "Replicas that serve the same objects, and the keys of their gossip", peersLsCommand(a),
		app.NounCommand("key", "Keys that the gossip of replicas is encrypted with", peersKeyAddCommand(a),
			peersKeyCommand(a, "use", "Let this replica encrypt with a key that all have",
				"Let this replica, and no other, encrypt with a key. It refuses while another replica lacks the key.", (*adminclient.Client).UsePeerKey),
			peersKeyCommand(a, "rm", "Remove a key from this replica that none encrypts with",
				"Remove a key from this replica, and no other. It refuses while this or another replica encrypts with it.", (*adminclient.Client).RemovePeerKey)))
}

func peersLsCommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:   "ls",
		Short: "List the replicas that are up, this one first",
		Long: "List the replicas that are up, as this one sees them, with this one first. The first of a replica's keys is the one\n" +
			"that it encrypts with.",
		RunE: show(a, (*adminclient.Client).Peers, printPeers),
	})
}

func printPeers(a *app.App, list []adminclient.Replica) {
	tab := terminal.NewTable("NAME", "GOSSIP", "PUSH", "KEYS", "FOR")
	for _, r := range list {
		name := r.Name
		if r.Self {
			name += " (this)"
		}
		tab.Add(name, r.Gossip, r.Push, strings.Join(r.Keys, ", "), terminal.Since(r.Since))
	}
	tab.Write(a.Stdout)
}

// maxKeyFile bounds the read of a key's file, in bytes.
const maxKeyFile = 4096

func peersKeyAddCommand(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use:   "add [FILE]",
		Short: "Let this replica decrypt with a key",
		Long: "Let this replica, and no other, decrypt with the key in a file; - is standard input. Without FILE a new key is made,\n" +
			"and printed only now: add it to all other replicas before one of them uses it.",
		Example: "  barchan peers key add >new.key\n  ssh other barchan peers key add - <new.key",
		RunE: func(cmd *cobra.Command, args []string) error {
			var key string
			if len(args) == 1 {
				var err error
				if key, err = readKey(cmd.Context(), a, args[0]); err != nil {
					return app.Usage(cmd, fmt.Errorf("FILE: %w", err))
				}
			}
			client, err := a.Admin()
			if err != nil {
				return err
			}
			added, err := client.AddPeerKey(cmd.Context(), key)
			if err != nil {
				return err
			}
			if added.Key == "" {
				fmt.Fprintln(a.Stdout, added.ID)
				return nil
			}
			fmt.Fprintf(a.Stderr, "key %s; it is a secret, and is not shown again:\n", added.ID)
			fmt.Fprintln(a.Stdout, added.Key)
			return nil
		},
	}
}

func readKey(ctx context.Context, a *app.App, name string) (string, error) {
	from, err := a.Open(ctx, name)
	if err != nil {
		return "", err
	}
	defer func() { _ = from.Close() }()
	text, err := io.ReadAll(io.LimitReader(from, maxKeyFile))
	if err != nil {
		return "", err
	}
	key := strings.TrimSpace(string(text))
	if key == "" {
		return "", fmt.Errorf("%s is empty", name)
	}
	return key, nil
}

// peersKeyCommand returns a command on one key of the replica's.
func peersKeyCommand(a *app.App, use, short, long string, do func(*adminclient.Client, context.Context, string) error) *cobra.Command {
	return &cobra.Command{Use: use + " KEY-ID", Short: short, Long: long, RunE: func(cmd *cobra.Command, args []string) error {
		return a.WithAdmin(func(c *adminclient.Client) error { return do(c, cmd.Context(), args[0]) })
	}}
}
