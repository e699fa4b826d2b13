package admin

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
)

// ConfigCommand returns `barchan config`.
func ConfigCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print all settings, and where each came from",
		Long: "Print all settings as a file that --config takes. Flags win over BARCHAN_* variables, these over the file,\n" +
			"and that over what is built in.",
	}
	a.JSONFlag(cmd)
	return withSettings(a, cmd, func(_ *cobra.Command, cfg *config.Resolved) error {
		if a.JSON {
			return a.PrintJSON(cfg)
		}
		if cfg.File != "" {
			fmt.Fprintln(a.Stdout, "# read from "+cfg.File)
		}
		return cfg.WriteYAML(a.Stdout)
	})
}
