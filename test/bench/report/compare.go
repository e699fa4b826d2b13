package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
)

// SaveHistory appends the report to a file as one line.
func (r *Report) SaveHistory(path string) (err error) {
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("--history: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644) //nolint:gosec // a path of the user's
	if err != nil {
		return fmt.Errorf("--history: %w", err)
	}
	if _, err = f.Write(append(line, '\n')); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("--history: %w", err)
	}
	return nil
}

// readReports returns the reports of a file: one of --json, or all of --history.
func readReports(path string) (list []*Report, err error) {
	f, err := os.Open(path) //nolint:gosec // a path of the user's
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	for dec := json.NewDecoder(f); ; {
		r := &Report{}
		switch err := dec.Decode(r); {
		case errors.Is(err, io.EOF) && len(list) > 0:
			return list, nil
		case err != nil:
			return nil, fmt.Errorf("%s: report %d: %w", path, len(list)+1, err)
		case len(r.Figures) == 0:
			return nil, fmt.Errorf("%s: report %d has no figures", path, len(list)+1)
		}
		list = append(list, r)
	}
}

// Compare prints what differs between two runs: the last ones of two files, or the last two of one.
func Compare(paths []string, w io.Writer) error {
	var runs []*Report
	for _, path := range paths {
		list, err := readReports(path)
		if err != nil {
			return err
		}
		if len(paths) == 2 {
			list = list[len(list)-1:]
		}
		runs = append(runs, list...)
	}
	if len(runs) < 2 {
		return fmt.Errorf("%s has one report; name a second file", paths[0])
	}
	return compareReports(runs[len(runs)-2], runs[len(runs)-1], w)
}

func compareReports(before, after *Report, w io.Writer) error {
	for _, r := range []*Report{before, after} {
		fmt.Fprintf(w, "%s: %s\n  %s, load at the start %s\n", r.Began.UTC().Format("2006-01-02 15:04 MST"), r.Version, r.Machine, r.Load)
	}
	if before.Machine != after.Machine {
		fmt.Fprintln(w, "The machines differ: only the ratios to the floors say anything.")
	}
	type key struct{ group, name string }
	old := map[key]*Figure{}
	for _, f := range before.Figures {
		old[key{f.Group, f.Name}] = f
	}
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "FIGURE\tBEFORE\tAFTER\tCHANGE\tOF THE FLOOR\t")
	same, single := 0, 0
	for _, f := range after.grouped() {
		o := old[key{f.Group, f.Name}]
		if o == nil || o.Unit != f.Unit {
			continue
		}
		switch {
		case o.Interval == nil || f.Interval == nil:
			single++
			continue
		case o.Interval[1] >= f.Interval[0] && f.Interval[1] >= o.Interval[0]:
			same++
			continue
		}
		floors := ""
		if o.Floor != nil && f.Floor != nil {
			floors = fmt.Sprintf("%s to %s", number(o.Floor.Ratio), number(f.Floor.Ratio))
		}
		fmt.Fprintf(tw, "%s: %s\t%s %s\t%s %s\t%+.0f %%\t%s\t\n", f.Group, f.Name, number(o.Median), o.Unit, number(f.Median), f.Unit, 100*(f.Median/o.Median-1), floors)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nListed are medians whose 95 %% confidence intervals do not overlap. %d others do; %d have too few rounds to tell.\n", same, single)
	return err
}
