package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

func (a *app) peersCommand() *cobra.Command {
	return nounCommand("peers", "Replicas that serve the same objects, and the keys of their gossip", a.peersLsCommand(),
		nounCommand("key", "Keys that the gossip of replicas is encrypted with", a.peersKeyAddCommand(), a.peersKeyUseCommand(), a.peersKeyRmCommand()))
}

func (a *app) peersLsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the replicas that are here, this one first",
		Long: "List the replicas that are here now as this one sees them, and this one first. Of the keys that a replica\n" +
			"understands, the first is the one that it speaks with.",
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			list, err := client.Peers(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			tab := newTable("NAME", "GOSSIP", "PUSH", "KEYS", "FOR")
			for _, r := range list {
				name := r.Name
				if r.Self {
					name += " (this)"
				}
				tab.add(name, r.Gossip, r.Push, strings.Join(r.Keys, ", "), since(r.Since))
			}
			tab.write(a.stdout)
			return nil
		},
	}
	a.jsonFlag(cmd)
	return cmd
}

// maxKeyFile bounds the read of a key's file, in bytes.
const maxKeyFile = 4096

func (a *app) peersKeyAddCommand() *cobra.Command {
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
				if key, err = a.readKey(cmd.Context(), args[0]); err != nil {
					return &usageError{cmd, fmt.Errorf("FILE: %w", err)}
				}
			}
			client, err := a.admin()
			if err != nil {
				return err
			}
			added, err := client.AddPeerKey(cmd.Context(), key)
			if err != nil {
				return err
			}
			if added.Key == "" {
				fmt.Fprintln(a.stdout, added.ID)
				return nil
			}
			fmt.Fprintf(a.stderr, "key %s; it is a secret, and is not shown again:\n", added.ID)
			fmt.Fprintln(a.stdout, added.Key)
			return nil
		},
	}
}

func (a *app) readKey(ctx context.Context, name string) (string, error) {
	from, err := a.open(ctx, name)
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

func (a *app) peersKeyUseCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "use KEY-ID",
		Short: "Have this replica speak with a key that all understand",
		Long:  "Have this replica, and no other, speak with a key. It refuses as long as one of the others does not understand it.",
		Args:  exactly("KEY-ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			return client.UsePeerKey(cmd.Context(), args[0])
		},
	}
}

func (a *app) peersKeyRmCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm KEY-ID",
		Short: "Have this replica forget a key that nobody speaks with",
		Long:  "Have this replica, and no other, forget a key. It refuses as long as it or one of the others speaks with it.",
		Args:  exactly("KEY-ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := a.admin()
			if err != nil {
				return err
			}
			return client.RemovePeerKey(cmd.Context(), args[0])
		},
	}
}
