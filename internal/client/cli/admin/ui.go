package admin

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// UICommand returns `barchan ui`.
func UICommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:   "ui",
		Short: "Print a link that signs a browser in to the dashboard",
		Long: "Print a link that signs a browser in to the dashboard of the key's namespace. It can be used once, within a minute.\n" +
			"The ticket in it follows a #, so that browsers send it to no server but by the page itself, and no log has it.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := a.Server(cmd.Context())
			if err != nil {
				return err
			}
			req, err := http.NewRequestWithContext(cmd.Context(), http.MethodPost, strings.TrimSuffix(t.URL, "/")+"/ui/api/tickets", nil)
			if err != nil {
				return fmt.Errorf("--api-url: %w: %w", errs.ErrInvalid, err)
			}
			req.Header.Set("X-API-Key", t.Key())
			res, err := t.HTTP.Do(req)
			if err != nil {
				return fmt.Errorf("make a link: %w", err)
			}
			defer func() { _ = res.Body.Close() }()
			var answer struct{ Ticket, Message string }
			if err := json.NewDecoder(io.LimitReader(res.Body, 1<<16)).Decode(&answer); err != nil || res.StatusCode != http.StatusOK {
				return fmt.Errorf("make a link: %s %s; is the server older than this program?", res.Status, answer.Message)
			}
			url := strings.TrimSuffix(t.URL, "/") + "/ui/#ticket=" + answer.Ticket
			return a.Result(map[string]string{"url": url}, url)
		},
	})
}
