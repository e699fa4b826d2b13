// Command canary holds one thing that may not survive storing on disk, and reports over HTTP whether
// it did. Its argument names the thing. GET / on the port of the variable PORT, 8080 without one, checks it: 200 means that it continues as it was,
// 500 what differs. A check sets up again what it used, so that it may be repeated.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"
)

// patience bounds the wait for what should happen automatically. It is no measure of speed: the machine may
// stand still for seconds, and the sandbox has half a core.
const patience = time.Minute

// kinds set something up, and return what checks it.
var kinds = map[string]func() (check func() error, err error){
	"memory": memory, "threads": threads, "epoll": epoll, "timers": timers, "clocks": clocks,
	"unix": unixSockets, "tcp": tcpLoopback, "udp": udpLoopback, "netlink": netlinkSocket,
	"deleted": deletedFile, "renamed": renamedFile, "mmap": sharedMapping, "locks": fileLocks, "memfd": memoryFile, "shm": sharedMemory,
	"directory": deletedDirectory, "inotify": watchedDirectory,
	"pipe": pipes, "fifo": namedPipe, "eventfd": counter, "signalfd": signalFile,
	"stopped": stoppedChild, "zombie": deadChild, "terminal": terminal, "itself": deletedProgram,
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "kinds" {
		for _, kind := range slices.Sorted(maps.Keys(kinds)) {
			fmt.Println(kind)
		}
		return
	}
	if len(os.Args) != 2 || kinds[os.Args[1]] == nil {
		fmt.Fprintf(os.Stderr, "usage: canary kinds|%v\n", slices.Sorted(maps.Keys(kinds)))
		os.Exit(2)
	}
	directory = filepath.Join("/home/user/things", os.Args[1])
	check, err := kinds[os.Args[1]]()
	if err != nil {
		fmt.Fprintf(os.Stderr, "set up %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
	var mu sync.Mutex
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintf(w, "%s in process %d\n", os.Args[1], os.Getpid())
	})
	fmt.Fprintln(os.Stderr, http.ListenAndServe(":"+cmp.Or(os.Getenv("PORT"), "8080"), nil))
	os.Exit(1)
}

// await polls until check is true.
func await(what string, so func() bool) error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if so() {
			return nil
		}
	}
	return fmt.Errorf("%s: not within %v", what, patience)
}

// threadOf runs f on a thread of the kernel that nothing else uses.
func threadOf(f func()) {
	go func() {
		runtime.LockOSThread()
		f()
	}()
}

// all joins what several checks find.
func all(checks ...func() error) func() error {
	return func() error {
		var found []error
		for _, c := range checks {
			found = append(found, c())
		}
		return errors.Join(found...)
	}
}

// within bounds what may block.
func within(what string, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	case <-time.After(patience):
		return fmt.Errorf("%s: it waits", what)
	}
}
