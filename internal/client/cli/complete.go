package cli

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/admin"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/files"
	"github.com/barchan-dev/barchan/internal/config"
)

// completeWithin bounds the shell's wait. Without a response, nothing is offered.
const completeWithin = time.Second

// completer finds what may come next on the command line.
type completer struct{ *app.App }

// choices are the completions of a word, each optionally with a description after a tab.
type choices func(ctx context.Context, cmd *cobra.Command) ([]string, error)

// complete adds completions for the arguments of all commands, by the words of their usage lines, and
// for their flags.
func (a completer) complete(cmd *cobra.Command) {
	args, flags := a.argumentChoices(), a.flagChoices()
	if words := app.Placeholders(cmd.Use); len(words) > 0 {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, given []string, word string) ([]string, cobra.ShellCompDirective) {
			last := words[len(words)-1]
			at := strings.Trim(append(words, last)[min(len(given), len(words))], "[].")
			switch {
			case len(given) >= len(words) && !strings.HasSuffix(last, "..."):
				return nil, cobra.ShellCompDirectiveNoFileComp
			case strings.HasPrefix(at, "FILE"):
				return nil, cobra.ShellCompDirectiveDefault
			case at == "DIR":
				return nil, cobra.ShellCompDirectiveFilterDirs
			case at == "SOURCE" || at == "DESTINATION":
				return a.pathChoices(cmd, given, word)
			}
			return offer(cmd, args[at], given, word)
		}
	}
	register := func(f *pflag.Flag) {
		find, ok := flags[strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")+" "+f.Name]
		if !ok {
			find, ok = flags[f.Name]
		}
		if ok {
			// It fails only for a flag that has choices already.
			_ = cmd.RegisterFlagCompletionFunc(f.Name, func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
				if find == nil {
					return nil, cobra.ShellCompDirectiveDefault
				}
				return offer(cmd, find, nil, word)
			})
		}
	}
	cmd.Flags().VisitAll(register)
	cmd.PersistentFlags().VisitAll(register)
	for _, sub := range cmd.Commands() {
		a.complete(sub)
	}
}

// offer returns the choices that begin with word, except those already given.
func offer(cmd *cobra.Command, find choices, given []string, word string) ([]string, cobra.ShellCompDirective) {
	if find == nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
	defer cancel()
	cmd.SetContext(ctx)
	found, err := find(ctx, cmd)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return slices.DeleteFunc(found, func(text string) bool {
		name, _, _ := strings.Cut(text, "\t")
		return !strings.HasPrefix(name, word) || slices.Contains(given, name)
	}), cobra.ShellCompDirectiveNoFileComp
}

// argumentChoices are keyed by the words of usage lines.
func (a completer) argumentChoices() map[string]choices {
	return map[string]choices{
		"SANDBOX": a.sandboxChoices, "SNAPSHOT": a.snapshotChoices, "VOLUME": a.volumeChoices, "IMAGE": a.imageChoices,
		"TEMPLATE": a.objectChoices(app.TemplateKind()), "POOL": a.objectChoices(app.PoolKind()), "KEY": a.objectChoices(app.KeyKind()),
	}
}

// flagChoices are keyed by flag, or by command and flag; nil is a file.
func (a completer) flagChoices() map[string]choices {
	return map[string]choices{
		"sandbox": a.sandboxChoices, "from": a.snapshotChoices, "template": a.templateChoices, "from-template": a.templateChoices, "image": a.imageChoices,
		"pool create template": a.objectChoices(app.TemplateKind()), "namespace": a.namespaceChoices,
		"output": fixed(app.Formats()...), "ls state": fixed(app.AnyState()...), "net leases state": fixed(admin.LeaseStates()...),
		"pool create update": fixed("OnReplenish", "Recreate"), "env shell": fixed("sh", "fish", "json"), "net trace protocol": fixed("tcp", "udp", "icmp"),
		"log-level": fixed("debug", "info", "warn", "error"), "role": fixed(config.RoleServer, config.RoleController, config.RoleReplica),
		"quota-counts": fixed(config.QuotaRunning, config.QuotaAll), "paused-addresses": fixed(config.AddressesKept, config.AddressesReleased),
		"config": nil, "kubeconfig": nil, "ca-file": nil, "file": nil, "data-dir": nil,
	}
}

func fixed(values ...string) choices {
	return func(context.Context, *cobra.Command) ([]string, error) { return slices.Clone(values), nil }
}

func (a completer) sandboxChoices(ctx context.Context, _ *cobra.Command) ([]string, error) {
	t, err := a.Server(ctx)
	if err != nil {
		return nil, err
	}
	list, err := t.REST.List(ctx, client.ListOptions{States: app.AnyState()})
	var out []string
	for _, s := range list {
		if s.Name != "" {
			out = append(out, s.Name+"\t"+s.SandboxID+", "+s.State)
		}
		out = append(out, s.SandboxID+"\t"+strings.TrimPrefix(s.Name+", "+s.State, ", "))
	}
	return out, err
}

func (a completer) snapshotChoices(ctx context.Context, _ *cobra.Command) ([]string, error) {
	t, err := a.Server(ctx)
	if err != nil {
		return nil, err
	}
	list, err := t.REST.Snapshots(ctx, client.SnapshotsOptions{})
	var out []string
	seen := map[string]bool{}
	for _, s := range list { // the newest first
		name, _, _ := strings.Cut(s.SnapshotID, ":")
		if !seen[name] {
			out = append(out, name+"\tthe newest, "+s.SnapshotID)
		}
		seen[name] = true
		out = append(out, s.SnapshotID+"\tof "+s.SandboxID)
	}
	return out, err
}

// volumeChoices are the volumes of the key.
func (a completer) volumeChoices(ctx context.Context, _ *cobra.Command) ([]string, error) {
	t, err := a.Server(ctx)
	if err != nil {
		return nil, err
	}
	list, err := t.REST.Volumes(ctx)
	var out []string
	for _, v := range list {
		out = append(out, v.Name+"\t"+v.VolumeID)
	}
	return out, err
}

// templateChoices are the templates of the key.
func (a completer) templateChoices(ctx context.Context, _ *cobra.Command) ([]string, error) {
	t, err := a.Server(ctx)
	if err != nil {
		return nil, err
	}
	list, err := t.REST.Templates(ctx)
	var out []string
	for _, l := range list {
		for _, alias := range l.Aliases {
			out = append(out, alias+"\t"+l.TemplateID)
		}
		out = append(out, l.TemplateID+"\t"+strings.Join(l.Aliases, " "))
	}
	return out, err
}

func (a completer) imageChoices(ctx context.Context, _ *cobra.Command) ([]string, error) {
	client, err := a.Admin()
	if err != nil {
		return nil, err
	}
	list, err := client.Images(ctx)
	var out []string
	for _, i := range list {
		out = append(out, i.Ref)
	}
	return out, err
}

func (a completer) namespaceChoices(ctx context.Context, _ *cobra.Command) ([]string, error) {
	k, err := a.Kube(ctx)
	if err != nil {
		return nil, err
	}
	list, err := k.Client.Resource(app.NamespacesResource).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var out []string
	for i := range list.Items {
		out = append(out, list.Items[i].GetName())
	}
	return out, nil
}

// objectChoices are the names and IDs of a kind, in the command line's namespace.
func (a completer) objectChoices(of app.Kind) choices {
	return func(ctx context.Context, cmd *cobra.Command) ([]string, error) {
		k, err := a.Kube(ctx)
		if err != nil {
			return nil, err
		}
		if err := a.ChooseNamespace(ctx, cmd); err != nil {
			return nil, err
		}
		namespaces := []string{cmd.Flag("namespace").Value.String()}
		if of.Noun == "template" && cmd.Name() != "rm" { // every namespace can use the public ones
			namespaces = append(namespaces, app.PublicNamespace)
		}
		var out []string
		for _, namespace := range slices.Compact(namespaces) {
			list, err := k.Client.Resource(of.GroupVersionResource).Namespace(namespace).List(ctx, metav1.ListOptions{})
			if err != nil {
				return nil, err
			}
			for i := range list.Items {
				name, id := list.Items[i].GetName(), of.ID(&list.Items[i])
				out = append(out, name+"\t"+id, id+"\t"+name)
			}
		}
		return out, nil
	}
}

// pathChoices are local files, and sandboxes with the colon before a path. Shells offer either files
// or a program's choices: the files are listed here.
func (a completer) pathChoices(cmd *cobra.Command, given []string, word string) ([]string, cobra.ShellCompDirective) {
	const directive = cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
	if _, _, remote := files.CutRemote(word); remote {
		return nil, directive
	}
	var out []string
	dir, start := filepath.Split(word)
	entries, _ := os.ReadDir(filepath.Clean(dir + ".")) // unreadable directories are not offered
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), start) && (start != "" || !strings.HasPrefix(e.Name(), ".")) {
			name := dir + e.Name()
			if e.IsDir() {
				name += "/"
			}
			out = append(out, name)
		}
	}
	if len(given) == 1 {
		if _, _, remote := files.CutRemote(given[0]); remote {
			return out, directive
		}
	}
	found, _ := offer(cmd, a.sandboxChoices, nil, word)
	for _, text := range found {
		name, about, _ := strings.Cut(text, "\t")
		out = append(out, name+":\t"+about)
	}
	return out, directive
}
