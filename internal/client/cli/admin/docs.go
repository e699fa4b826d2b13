package admin

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/docsite"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// DocsCommand returns `barchan docs`.
func DocsCommand(a *app.App) *cobra.Command {
	var out string
	cmd := a.JSONFlag(&cobra.Command{
		Use:   "docs",
		Short: "Print where the documentation is, or write it as files",
		Long: "Print the address at which the server shows its documentation, for browsers, without a key.\n" +
			"With --out, write the same pages to a directory; no server is needed, and a browser opens them from there.",
		Example: "  barchan docs\n  barchan docs --out site      # then open site/index.html",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("out") {
				return writeSite(a, cmd, out)
			}
			url := a.First(a.APIURL, client.EnvAPIURL, client.EnvE2BAPIURL)
			if url == "" {
				s, err := a.LocalServer(cmd.Context())
				if err != nil {
					return err
				}
				url = "http://" + app.Dialable(s.Addresses.HTTP)
			}
			url = strings.TrimSuffix(url, "/") + docsite.Path + "/"
			return a.Result(map[string]string{"url": url}, url)
		},
	})
	cmd.Flags().StringVar(&out, "out", "", "write the pages to this `directory`, which must be empty or missing")
	return cmd
}

// writeSite writes the pages, and prints the first of them.
func writeSite(a *app.App, cmd *cobra.Command, dir string) error {
	if dir == "" {
		return app.Usage(cmd, errors.New("--out: the directory is missing"))
	}
	site, err := docsite.Build(barchan.Documents)
	if err != nil {
		return err
	}
	if err := site.Write(dir); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	first := filepath.Join(dir, docsite.FirstPage)
	return a.Result(map[string]string{"file": first}, first)
}
