package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/config"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print all settings, and where each came from",
		Long: "Print all settings as a file that --config takes. Flags win over BARCHAN_* variables, these over the file,\n" +
			"and that over what is built in.",
		Args: exactly(),
	}
	a.jsonFlag(cmd)
	flags := config.AddFlags(cmd.Flags(), notDataDir)
	cmd.RunE = func(*cobra.Command, []string) error {
		cfg, err := a.config(flags)
		if err != nil {
			return err
		}
		if a.json {
			return a.printJSON(cfg)
		}
		if cfg.File != "" {
			fmt.Fprintln(a.stdout, "# read from "+cfg.File)
		}
		return cfg.WriteYAML(a.stdout)
	}
	return cmd
}
