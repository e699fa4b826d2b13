package bench

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/prometheus/procfs"
)

// processorTimes returns the processor time so far, in ms, of this process, the client, and of the programs that it has started,
// by their names.
func processorTimes(t testing.TB) counts {
	t.Helper()
	all := counts{}
	processes, err := procfs.AllProcs()
	must(t, err)
	for _, p := range processes {
		stat, err := p.Stat()
		program, linkErr := p.Executable()
		if errors.Join(err, linkErr) != nil {
			continue // it has exited, or is a thread of the kernel
		}
		switch millis := 1000 * stat.CPUTime(); os.Getpid() {
		case p.PID:
			all["client"] += millis
		case stat.PPID:
			all[filepath.Base(program)] += millis
		}
	}
	return all
}
