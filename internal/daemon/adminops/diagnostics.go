package adminops

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// diagnostics returns the goroutines and, after the boot, the journal. A server in a process of its own adds its goroutines.
func (s Server) diagnostics(ctx context.Context) (adminclient.Diagnostics, error) {
	var d adminclient.Diagnostics
	var stacks bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&stacks, 1); err != nil {
		return d, fmt.Errorf("read goroutines: %w", err)
	}
	if s.cfg.Process != nil {
		limited, cancel := context.WithTimeout(ctx, processAnswers)
		defer cancel()
		server, err := s.cfg.Process.Admin().Diagnostics(limited)
		if err != nil {
			server.Goroutines = err.Error() + "\n"
		}
		fmt.Fprintf(&stacks, "\nserver process:\n%s", server.Goroutines)
	}
	d.Goroutines = stacks.String()
	parts, err := s.ready()
	if err != nil || parts.Machine == nil {
		return d, nil // a server that boots has goroutines alone
	}
	rows, err := parts.Machine.Node.JournalSummary()
	d.Journal = JournalRows(rows)
	return d, err
}

// JournalRows returns summaries as the admin API has them; never nil.
func JournalRows(rows []journal.Summary) []adminclient.JournalRow {
	out := make([]adminclient.JournalRow, 0, len(rows))
	for _, r := range rows {
		out = append(out, adminclient.JournalRow{
			UID: string(r.Ref.UID), Namespace: r.Ref.Namespace, Name: r.Ref.Name, ID: string(r.ID), Stage: string(r.Stage), StartedAt: r.StartedAt, PausedAt: r.PausedAt,
		})
	}
	return out
}
