package sandboxes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

const (
	logPage  = 1000
	logEvery = time.Second
)

// LogsCommand returns `barchan logs`.
func LogsCommand(a *app.App) *cobra.Command {
	var follow, stamps bool
	var container string
	cmd := &cobra.Command{
		Use:   "logs SANDBOX",
		Short: "Print the log of a sandbox",
		Long:  "Print what the template's program and the agent of a sandbox wrote. The API has no stream of it: -f polls once a second.",
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "follow the log until the sandbox ends")
	cmd.Flags().BoolVar(&stamps, "timestamps", false, "begin each line with its time")
	cmd.Flags().StringVarP(&container, "container", "c", "", "container of a sandbox with several (default: the first)")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			id, err := t.Resolve(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return logs(cmd.Context(), a, t, id, container, follow, stamps)
		})
	}
	return cmd
}

// logs reads page after page. The API's cursor has milliseconds, so a page begins with lines of the
// previous one; those of its last millisecond are dropped.
func logs(ctx context.Context, a *app.App, t *app.Server, id, container string, follow, stamps bool) error {
	var cursor time.Time
	seen := map[string]int{}
	tick := time.NewTicker(logEvery)
	defer tick.Stop()
	for first := true; ; first = false {
		entries, err := t.REST.Logs(ctx, id, client.LogOptions{Since: cursor, Limit: logPage, Container: container})
		if err != nil {
			if !first && errors.Is(err, errs.ErrNotFound) {
				return nil // it ended
			}
			if d, getErr := t.REST.Get(ctx, id); getErr == nil && d.State == client.StatePaused {
				return app.PausedError(id)
			}
			return err
		}
		fresh := unseen(entries, &cursor, seen)
		for _, e := range fresh {
			if err := printLog(a, e, stamps); err != nil {
				return err
			}
		}
		if len(entries) == logPage && len(fresh) > 0 {
			continue
		}
		if !follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// unseen drops the entries that were read before, and moves the cursor to the newest. seen counts the
// entries of the cursor's millisecond.
func unseen(entries []client.LogEntry, cursor *time.Time, seen map[string]int) []client.LogEntry {
	before := maps.Clone(seen)
	var fresh []client.LogEntry
	for _, e := range entries {
		at := e.Timestamp.Truncate(time.Millisecond)
		key := e.Timestamp.String() + e.Level + e.Message
		if at.Before(*cursor) {
			continue
		}
		if at.Equal(*cursor) && before[key] > 0 {
			before[key]--
			continue
		}
		if at.After(*cursor) {
			*cursor = at
			clear(seen)
			clear(before)
		}
		seen[key]++
		fresh = append(fresh, e)
	}
	return fresh
}

func printLog(a *app.App, e client.LogEntry, stamps bool) error {
	if a.JSON {
		return json.NewEncoder(a.Stdout).Encode(e)
	}
	if stamps {
		fmt.Fprint(a.Stdout, e.Timestamp.Local().Format("2006-01-02T15:04:05.000 "))
	}
	_, err := fmt.Fprintln(a.Stdout, e.Message)
	return err
}
