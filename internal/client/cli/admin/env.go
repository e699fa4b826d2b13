package admin

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// variable is an environment variable for clients; without export it is only shown.
type variable struct {
	name, value string
	hint        string // why it is not exported; empty: it is
	unset       bool   // clients must not have it
}

// EnvCommand returns `barchan env`.
func EnvCommand(a *app.App) *cobra.Command {
	var tls bool
	var shell string
	cmd := &cobra.Command{
		Use:   "env",
		Short: "Print the environment that E2B SDKs and kubectl need",
		Long: "Print the environment that E2B SDKs and kubectl need, for eval:\n\n    eval \"$(barchan env)\"\n\n" +
			"Without --tls, clients speak plain HTTP to the server's address. With it they speak TLS to hosts below the server's\n" +
			"domain, which must resolve to this machine (names below .localhost do, with most resolvers). The variables of the other\n" +
			"way are unset. The key is the data directory's, or the one given, which the server must know.",
	}
	cmd.Flags().BoolVar(&tls, "tls", false, "for clients that go by the domain over TLS")
	cmd.Flags().StringVar(&shell, "shell", "sh", "sh, fish, csh or json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if _, known := shells[shell]; !known && shell != "json" {
			return app.Usage(cmd, fmt.Errorf("--shell: %q is not sh, fish, csh or json", shell))
		}
		s, err := a.LocalServer(cmd.Context())
		if err != nil {
			return err
		}
		key, err := knownKey(cmd.Context(), a, s.Addresses)
		if err != nil {
			return err
		}
		vars, err := environment(s.Addresses, key, tls)
		if err != nil {
			return err
		}
		return printEnv(a, vars, shell)
	}
	return cmd
}

// knownKey returns the given key, if the server accepts it, else the key of the data directory.
func knownKey(ctx context.Context, a *app.App, addr adminclient.Addresses) (string, error) {
	key := a.First(a.APIKey, app.EnvAPIKey)
	if key == "" {
		return app.ReadKey(addr.APIKeyFile)
	}
	c, err := client.New(client.Config{URL: "http://" + app.Dialable(addr.HTTP), Key: key, HTTP: &http.Client{Transport: client.NewTransport()}})
	if err == nil {
		_, err = c.Namespace(ctx)
	}
	if err != nil {
		return "", fmt.Errorf("check the key that was given (--api-key, %s): %w", app.EnvAPIKey, err)
	}
	return key, nil
}

func environment(addr adminclient.Addresses, key string, tls bool) ([]variable, error) {
	vars := []variable{{name: "E2B_API_KEY", value: key}, {name: "KUBECONFIG", value: addr.Kubeconfig}}
	if !tls {
		url := "http://" + app.Dialable(addr.HTTP)
		vars = append(vars, variable{name: "E2B_API_URL", value: url}, variable{name: "E2B_SANDBOX_URL", value: url}, variable{name: "E2B_VOLUME_API_URL", value: url})
		domain := variable{name: "E2B_DOMAIN", unset: true}
		if addr.TLS != "" {
			domain = variable{name: "E2B_DOMAIN", value: addr.Domain}
		}
		return append(vars, domain), nil
	}
	if addr.TLS == "" {
		return nil, fmt.Errorf("the server does not serve TLS; set tlsAddr and start it again: %w", errs.ErrInvalid)
	}
	// SDKs prefer the URLs to the domain.
	vars = append(vars, variable{name: "E2B_DOMAIN", value: addr.Domain},
		variable{name: "E2B_API_URL", unset: true}, variable{name: "E2B_SANDBOX_URL", unset: true}, variable{name: "E2B_VOLUME_API_URL", unset: true})
	if addr.CAFile != "" {
		vars = append(vars,
			variable{name: "NODE_EXTRA_CA_CERTS", value: addr.CAFile},
			variable{name: "SSL_CERT_FILE", value: addr.CAFile, hint: "for Python; it replaces all other authorities"})
	}
	return vars, nil
}

// shells have the syntax to set and unset a variable.
var shells = map[string]struct {
	set, unset string
	quote      func(string) string
}{
	"sh":   {"export %s=%s", "unset %s", quoteShell},
	"fish": {"set -gx %s %s;", "set -e %s;", quoteFish},
	"csh":  {"setenv %s %s;", "unsetenv %s;", quoteShell},
}

func printEnv(a *app.App, vars []variable, shell string) error {
	if shell == "json" {
		out := map[string]string{}
		for _, v := range vars {
			if !v.unset {
				out[v.name] = v.value
			}
		}
		return a.PrintJSON(out)
	}
	for _, v := range vars {
		text := fmt.Sprintf(shells[shell].set, v.name, shells[shell].quote(v.value))
		if v.unset {
			text = fmt.Sprintf(shells[shell].unset, v.name)
		}
		if v.hint != "" {
			text = "# " + v.hint + ": " + text
		}
		fmt.Fprintln(a.Stdout, text)
	}
	return nil
}

func quoteShell(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func quoteFish(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
}
