package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// clockTick is the unit of /proc/PID/stat in milliseconds: Linux reports times in hundredths of a second to programs.
const clockTick = 10

// processorTimes returns the processor time so far, in ms, of this process, the client, and of the programs that it has started,
// by their names.
func processorTimes(t testing.TB) counts {
	t.Helper()
	all := counts{}
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		program, linkErr := os.Readlink(filepath.Join(filepath.Dir(file), "exe"))
		if errors.Join(err, linkErr) != nil {
			continue // it has exited, or is a thread of the kernel
		}
		parent, took, err := parseStat(string(text))
		must(t, err)
		switch pid := strconv.Itoa(os.Getpid()); {
		case filepath.Base(filepath.Dir(file)) == pid:
			all["client"] += took
		case strconv.Itoa(parent) == pid:
			all[filepath.Base(program)] += took
		}
	}
	return all
}

// parseStat returns the parent of a process and its processor time in ms; see proc_pid_stat(5).
func parseStat(text string) (parent int, millis float64, err error) {
	_, rest, ok := strings.Cut(text[strings.LastIndexByte(text, ')')+1:], " ") // the name before may contain anything
	var state string
	var skipped, user, system int
	if ok {
		_, err = fmt.Sscan(rest, &state, &parent, &skipped, &skipped, &skipped, &skipped, &skipped, &skipped, &skipped, &skipped, &skipped, &user, &system)
	}
	if !ok || err != nil {
		return 0, 0, fmt.Errorf("%q: %w", text, errors.Join(err, fs.ErrInvalid))
	}
	return parent, float64(user+system) * clockTick, nil
}
