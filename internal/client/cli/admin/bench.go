package admin

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// benchProgram is beside barchan. It is a program of its own, so that barchan has nothing of it in memory.
const benchProgram = "barchan-bench"

// BenchCommand returns `barchan bench`.
func BenchCommand(a *app.App) *cobra.Command {
	var only, out, dir, history string
	var quick bool
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure this machine, and write a report with plots",
		Long: "Measure creates, claims, commands, transfers, sleep and forks on this machine, and write a report as a web page.\n" +
			"It starts a server of its own beside a running one, with its own directories, ports and addresses, and removes it at\n" +
			"the end, also after Ctrl-C. Each result stands beside a floor: what the same work costs here without Barchan, measured\n" +
			"in the same run. It needs root, and 10 to 15 minutes on two processors; --quick only shows that it works. Results are\n" +
			"only as quiet as the machine: the report says its load. The parts are boot, create, exec, claim, image, build,\n" +
			"interpreter, transfer, volume, sleep, scale and memory.",
		Example: "  barchan bench\n  barchan bench --only create,claim --json\n  barchan bench --history runs.jsonl && barchan bench compare runs.jsonl",
		RunE: func(cmd *cobra.Command, _ []string) error {
			args := []string{"--html", out, "--dir", dir}
			if history != "" {
				args = append(args, "--history", history)
			}
			if only != "" {
				args = append(args, "--only", only)
			}
			if quick {
				args = append(args, "--quick")
			}
			if a.JSON {
				args = append(args, "--json")
			}
			if err := runBench(cmd, args...); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "The report is in %s.\n", out)
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&only, "only", "", "measure only these `parts`, separated by commas")
	f.StringVar(&out, "out", "barchan-bench.html", "`file` of the report")
	f.StringVar(&history, "history", "", "append the report to this `file` too, a line of JSON for each run")
	f.StringVar(&dir, "dir", "/var/tmp", "`directory` for the server's data while it runs, on a disk")
	f.BoolVar(&quick, "quick", false, "a tenth of the rounds")
	cmd.AddCommand(&cobra.Command{
		Use:   "compare HISTORY|REPORT [REPORT]",
		Short: "Show what differs between two runs",
		Long: "Show which results differ by more than the noise of two runs: the last two of a history, or two reports of --json.\n" +
			"A result differs when the 95 % confidence intervals of its medians do not overlap.",
		Example: "  barchan bench compare runs.jsonl",
		RunE: func(cmd *cobra.Command, args []string) error {
			return runBench(cmd, append([]string{"compare"}, args...)...)
		},
	})
	return a.JSONFlag(cmd)
}

// runBench runs the program that measures.
func runBench(cmd *cobra.Command, args ...string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	program = filepath.Join(filepath.Dir(program), benchProgram)
	if _, err := os.Stat(program); err != nil {
		return fmt.Errorf("%w; it is part of the package of Barchan, and `scripts/build.sh bench` builds it in a source tree: %w", err, errs.ErrUnavailable)
	}
	child := exec.CommandContext(cmd.Context(), program, args...)
	child.Stdout, child.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
	child.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's Ctrl-C reaches it once, by Cancel
	child.Cancel = func() error { return child.Process.Signal(syscall.SIGTERM) }
	if err := child.Run(); err != nil {
		if _, ended := errors.AsType[*exec.ExitError](err); ended {
			return fmt.Errorf("%s failed; see above: %w", benchProgram, err)
		}
		return err
	}
	return nil
}
