// Package report holds what a run of the benchmark has found out, and writes it: as a table, as JSON, as a page with plots, and
// as a line of a history whose runs it compares. A figure stands beside its floor, which is the cost of the same work without
// Barchan, and beside the bar that it shall keep to. The package measures nothing.
package report
