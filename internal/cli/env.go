package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/adminclient"
	"github.com/barchan-dev/barchan/internal/errs"
)

// variable is one that clients need; one without export is only told.
type variable struct {
	name, value string
	hint        string // why it is not exported; empty: it is
}

func (a *app) envCommand() *cobra.Command {
	var tls bool
	var shell string
	cmd := &cobra.Command{
		Use:   "env",
		Short: "Print the environment that E2B SDKs and kubectl need",
		Long: "Print the environment that E2B SDKs and kubectl need, for eval:\n\n    eval \"$(barchan env)\"\n\n" +
			"Without --tls, clients speak plain HTTP to the server's address. With it they speak TLS to hosts below the server's\n" +
			"domain, which must resolve to this machine (names below .localhost do, with most resolvers).",
		Args: exactly(),
	}
	cmd.Flags().BoolVar(&tls, "tls", false, "for clients that go by the domain over TLS")
	cmd.Flags().StringVar(&shell, "shell", "sh", "sh, fish or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if shell != "sh" && shell != "fish" && shell != "json" {
			return &usageError{cmd, fmt.Errorf("--shell: %q is not sh, fish or json", shell)}
		}
		s, err := a.localServer(cmd.Context())
		if err != nil {
			return err
		}
		key, err := readKey(s.Addresses.APIKeyFile)
		if err != nil {
			return err
		}
		vars, err := environment(s.Addresses, key, tls)
		if err != nil {
			return err
		}
		return a.printEnv(vars, shell)
	}
	return cmd
}

func environment(addr adminclient.Addresses, key string, tls bool) ([]variable, error) {
	vars := []variable{{name: "E2B_API_KEY", value: key}, {name: "KUBECONFIG", value: addr.Kubeconfig}}
	if !tls {
		url := "http://" + dialable(addr.HTTP)
		vars = append(vars, variable{name: "E2B_API_URL", value: url}, variable{name: "E2B_SANDBOX_URL", value: url})
		if addr.TLS != "" {
			vars = append(vars, variable{name: "E2B_DOMAIN", value: addr.Domain})
		}
		return vars, nil
	}
	if addr.TLS == "" {
		return nil, fmt.Errorf("the server does not serve TLS; set tlsAddr and start it again: %w", errs.ErrInvalid)
	}
	vars = append(vars, variable{name: "E2B_DOMAIN", value: addr.Domain})
	if addr.CAFile != "" {
		vars = append(vars,
			variable{name: "NODE_EXTRA_CA_CERTS", value: addr.CAFile},
			variable{name: "SSL_CERT_FILE", value: addr.CAFile, hint: "for Python; it replaces all other authorities"})
	}
	return vars, nil
}

func (a *app) printEnv(vars []variable, shell string) error {
	out := map[string]string{}
	for _, v := range vars {
		line := "export " + v.name + "=" + quoteShell(v.value)
		if shell == "fish" {
			line = "set -gx " + v.name + " " + quoteFish(v.value) + ";"
		}
		if v.hint != "" {
			line = "# " + v.hint + ": " + line
		}
		out[v.name] = v.value
		if shell != "json" {
			fmt.Fprintln(a.stdout, line)
		}
	}
	if shell == "json" {
		return a.printJSON(out)
	}
	return nil
}

func quoteShell(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func quoteFish(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
}
