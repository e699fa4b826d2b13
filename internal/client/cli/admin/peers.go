package admin

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// PeersCommand returns `barchan peers`.
func PeersCommand(a *app.App) *cobra.Command {
	return app.NounCommand("peers", "Replicas that serve the same objects, and the keys of their gossip", peersLsCommand(a),
		app.NounCommand("key", "Keys that the gossip of replicas is encrypted with", peersKeyAddCommand(a), peersKeyUseCommand(a), peersKeyRmCommand(a)))
}

func peersLsCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the replicas that are here, this one first",
		Long: "List the replicas that are here now as this one sees them, and this one first. Of the keys that a replica\n" +
			"understands, the first is the one that it speaks with.",
		Args: app.Exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.Admin()
			if err != nil {
				return err
			}
			list, err := client.Peers(cmd.Context())
			if err != nil {
				return err
			}
			if a.JSON {
				return a.PrintJSON(list)
			}
			tab := terminal.NewTable("NAME", "GOSSIP", "PUSH", "KEYS", "FOR")
			for _, r := range list {
				name := r.Name
				if r.Self {
					name += " (this)"
				}
				tab.Add(name, r.Gossip, r.Push, strings.Join(r.Keys, ", "), terminal.Since(r.Since))
			}
			tab.Write(a.Stdout)
			return nil
		},
	}
	a.JSONFlag(cmd)
	return cmd
}

// maxKeyFile bounds the read of a key's file, in bytes.
const maxKeyFile = 4096

func peersKeyAddCommand(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use:   "add [FILE]",
		Short: "Have this replica understand a key",
		Long: "Have this replica, and no other, understand the key in a file; - is the standard input. Without FILE a new key is\n" +
			"made, and printed this once: give it to all other replicas before any is told to use it.",
		Example: "  barchan peers key add >new.key\n  ssh other barchan peers key add - <new.key",
		Args:    cobra.MaximumNArgs(1),
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

func peersKeyUseCommand(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use:   "use KEY-ID",
		Short: "Have this replica speak with a key that all understand",
		Long:  "Have this replica, and no other, speak with a key. It refuses as long as one of the others does not understand it.",
		Args:  app.Exactly("KEY-ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := a.Admin()
			if err != nil {
				return err
			}
			return client.UsePeerKey(cmd.Context(), args[0])
		},
	}
}

func peersKeyRmCommand(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use:   "rm KEY-ID",
		Short: "Have this replica forget a key that nobody speaks with",
		Long:  "Have this replica, and no other, forget a key. It refuses as long as it or one of the others speaks with it.",
		Args:  app.Exactly("KEY-ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := a.Admin()
			if err != nil {
				return err
			}
			return client.RemovePeerKey(cmd.Context(), args[0])
		},
	}
}
