package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/restclient"
)

const (
	logPage  = 1000
	logEvery = time.Second
)

func (a *app) logsCommand() *cobra.Command {
	var follow, stamps bool
	cmd := &cobra.Command{
		Use:   "logs SANDBOX",
		Short: "Print the log of a sandbox",
		Long:  "Print what the template's program and the agent of a sandbox wrote. The API has no stream of it: -f asks once a second.",
		Args:  exactly("SANDBOX"),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the sandbox ends")
	cmd.Flags().BoolVar(&stamps, "timestamps", false, "begin each line with its time")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.withTarget(cmd.Context(), func(t *target) error {
			id, err := t.resolve(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.logs(cmd.Context(), t, id, follow, stamps)
		})
	}
	return cmd
}

// logs reads page after page. The API's cursor has milliseconds, so a page begins with lines of the
// previous one; those of its last millisecond are dropped.
func (a *app) logs(ctx context.Context, t *target, id string, follow, stamps bool) error {
	var cursor time.Time
	seen := map[string]int{}
	tick := time.NewTicker(logEvery)
	defer tick.Stop()
	for first := true; ; first = false {
		entries, err := t.rest.Logs(ctx, id, restclient.LogOptions{Since: cursor, Limit: logPage})
		if err != nil {
			if !first && errors.Is(err, errs.ErrNotFound) {
				return nil // it ended
			}
			if d, getErr := t.rest.Get(ctx, id); getErr == nil && d.State == restclient.StatePaused {
				return pausedError(id)
			}
			return err
		}
		fresh := unseen(entries, &cursor, seen)
		for _, e := range fresh {
			if err := a.printLog(e, stamps); err != nil {
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
func unseen(entries []restclient.LogEntry, cursor *time.Time, seen map[string]int) []restclient.LogEntry {
	before := maps.Clone(seen)
	var fresh []restclient.LogEntry
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

func (a *app) printLog(e restclient.LogEntry, stamps bool) error {
	if a.json {
		return json.NewEncoder(a.stdout).Encode(e)
	}
	if stamps {
		fmt.Fprint(a.stdout, e.Timestamp.Local().Format("2006-01-02T15:04:05.000 "))
	}
	_, err := fmt.Fprintln(a.stdout, e.Message)
	return err
}
