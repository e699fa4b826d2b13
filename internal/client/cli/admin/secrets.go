package admin

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// SecretsCommand returns `barchan secrets`.
func SecretsCommand(a *app.App) *cobra.Command {
	return app.NounCommand("secrets", "The key that encrypts Secrets in the object store", a.JSONFlag(&cobra.Command{
		Use:   "rotate",
		Short: "Replace the key that encrypts Secrets",
		Long: "Replace the key that encrypts Secrets in the object store of this machine's server, and encrypt all Secrets with the\n" +
			"new one. The old key is unneeded afterwards, but for backups from before. The server goes on meanwhile; if it\n" +
			"crashes, its next start finishes.",
		RunE: show(a, (*adminclient.Client).RotateSecrets, func(a *app.App, r adminclient.Rotation) {
			fmt.Fprintf(a.Stderr, "%d Secrets are encrypted with a new key; back it up\n", r.Written)
		}),
	}))
}
