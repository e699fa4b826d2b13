package admin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/config"
)

// AuditCommand returns `barchan audit`. It reads the file, not the server: what a server did is read after its end too.
func AuditCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Show who did what to which sandbox",
		Long: "Show the audit log of this machine's server, the oldest entries first: who did what, when, from which address, with\n" +
			"what result. It needs no running server, and the right to read the log, which root has.",
		Example: "  barchan audit --since 1h --sandbox i6ibp9j1t14s14x0zq1c",
	}
	var since time.Duration
	var filter auditlog.Filter
	var follow bool
	cmd.Flags().DurationVar(&since, "since", 0, "age of the oldest entry (default all)")
	cmd.Flags().StringVar(&filter.Sandbox, "sandbox", "", "ID of the sandbox that was acted on, or made")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more entries")
	a.JSONFlag(cmd)
	return withSettings(a, cmd, func(cmd *cobra.Command, cfg *config.Resolved) error {
		if since < 0 {
			return app.Usage(cmd, fmt.Errorf("--since: %s is in the future", since))
		}
		path := cfg.AuditFile()
		if path == "" {
			return errors.New("this server records nothing; set auditLog")
		}
		if since > 0 {
			filter.Since = time.Now().Add(-since)
		}
		found := false
		err := auditlog.Read(cmd.Context(), path, filter, follow, func(e auditlog.Entry) error {
			found = true
			if a.JSON {
				return json.NewEncoder(a.Stdout).Encode(e)
			}
			_, err := fmt.Fprintln(a.Stdout, auditLine(&e))
			return err
		})
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("no audit log at %s; start a server, or name its data directory with --data-dir", path)
		case errors.Is(err, fs.ErrPermission):
			return fmt.Errorf("%w; use root, or the server's user", err)
		case err == nil && !found:
			fmt.Fprintln(a.Stderr, "no entries")
		}
		return err
	})
}

func auditLine(e *auditlog.Entry) string {
	who := strings.TrimSpace(e.By + " " + e.Name)
	what := cmp.Or(e.Sandbox, strings.Join(e.Made, ","), e.Object)
	if e.Namespace != "" {
		what = e.Namespace + "/" + cmp.Or(what, "-")
	}
	result := e.Result
	if e.Status != 0 {
		result = fmt.Sprintf("%s (%d)", e.Result, e.Status)
	}
	return terminal.Escaped(fmt.Sprintf("%s  %-24s %-22s %-36s %-15s %s", e.Time.Local().Format(time.DateTime), who, e.Action, cmp.Or(what, e.Request), cmp.Or(e.Address, "-"), result), terminal.MaxErrorLine)
}
