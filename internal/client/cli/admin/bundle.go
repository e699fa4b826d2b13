package admin

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/dynamic"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/bundle"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/config"
)

// bundleDefault is the value of --bundle without a file.
const bundleDefault = "barchan-bundle-<node>-<time>.tar.gz"

// bundleFlag adds --bundle, whose file may also be the next argument, as of a flag that must have a value.
func bundleFlag(cmd *cobra.Command) *string {
	file := cmd.Flags().String("bundle", "", "write a support bundle without secrets to a new `file`")
	cmd.Flags().Lookup("bundle").NoOptDefVal = bundleDefault
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0:
			return nil
		case len(args) > 1 || *file != bundleDefault:
			return app.Usage(cmd, fmt.Errorf("%q is one argument too many", args[len(args)-1]))
		}
		*file = args[0]
		return nil
	}
	return file
}

// bundleName returns the name of a bundle without one.
func bundleName(node string, at time.Time) string {
	node = strings.Map(func(r rune) rune {
		if r == '/' || r < ' ' {
			return '-'
		}
		return r
	}, node)
	return "barchan-bundle-" + node + "-" + at.UTC().Format("20060102-150405") + ".tar.gz"
}

// bundleSummary is what --json prints.
type bundleSummary struct {
	File string `json:"file"`
	Size int64  `json:"size"` // bytes
	bundle.Manifest
}

// writeBundle collects a support bundle, writes it and prints what is inside. A part that fails is a warning.
func writeBundle(ctx context.Context, a *app.App, cfg *config.Resolved, file string) error {
	if file == bundleDefault {
		file = bundleName(cfg.NodeName, time.Now())
	}
	if err := bundle.CheckFree(file); err != nil {
		return err
	}
	done := a.NotifyIfSlow("collecting")
	b, err := bundle.Collect(ctx, bundleSources(a, cfg))
	done()
	if err != nil {
		return err
	}
	size, err := b.WriteFile(file)
	if err != nil {
		return err
	}
	summary := bundleSummary{file, size, b.Manifest}
	if a.JSON {
		err = a.PrintJSON(summary)
	} else {
		printBundle(a, &summary)
	}
	if n := b.Manifest.Failed(); n > 0 {
		fmt.Fprintf(a.Stderr, "barchan: warning: %d of %d parts are missing or incomplete; manifest.json has the reasons\n", n, len(b.Manifest.Parts))
	}
	return err
}

func bundleSources(a *app.App, cfg *config.Resolved) bundle.Config {
	sources := bundle.Config{
		Settings: cfg, Version: a.Version(), Admin: adminclient.New(cfg.AdminSocket(), cfg.DataDir),
		Doctor: func(ctx context.Context) []adminclient.Check { return checks(ctx, a, cfg) },
		Kube: func(ctx context.Context) (dynamic.Interface, error) {
			k, err := a.Kube(ctx)
			if err != nil {
				return nil, err
			}
			return k.Client, nil
		},
		Events: func(ctx context.Context) ([]client.SandboxEvent, error) {
			t, err := a.Server(ctx)
			if err != nil {
				return nil, err
			}
			return t.REST.Events(ctx, client.EventsRequest{Limit: bundleEvents})
		},
	}
	if a.Deps.Journal != nil {
		sources.Journal = func() ([]adminclient.JournalRow, error) { return a.Deps.Journal(&cfg.Config) }
	}
	return sources
}

// bundleEvents is the most events that the API returns at once.
const bundleEvents = 100

func printBundle(a *app.App, s *bundleSummary) {
	fmt.Fprintf(a.Stdout, "Wrote %s (%s). Look through it before you send it.\n\n", s.File, terminal.Size(s.Size))
	a.Field(8, "Server", s.Server)
	fmt.Fprintln(a.Stdout)
	tab := terminal.NewTable("INSIDE", "SIZE", "NOTE")
	for i := range s.Parts {
		p := &s.Parts[i]
		note := p.Note
		if p.Error != "" {
			note = "failed: " + p.Error
		}
		tab.Add(p.Name, terminal.Size(int64(p.Bytes)), note)
	}
	tab.Write(a.Stdout)
	fmt.Fprintln(a.Stdout, "\nRemoved:")
	for _, r := range s.Removed {
		fmt.Fprintln(a.Stdout, "- "+r)
	}
}
