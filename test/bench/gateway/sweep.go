package gateway

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
)

// clusterName is a network namespace of a cluster: its tag, and a part. The test process with the
// ID p tags its clusters with bcl and p%20*10 plus a number that counts from 1.
var clusterName = regexp.MustCompile(`^(bcl(\d+))(?:sb|r\d+)$`)

// sweepTime bounds a sweep.
const sweepTime = time.Minute

// sweepClusters removes what clusters have left whose test process was killed: replicas that run
// on, namespaces, links, tables and files. Those of a process that may still live are let be.
func sweepClusters(ctx context.Context, b *harness.Bench) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTime)
	defer cancel()
	entries, err := os.ReadDir("/run/netns")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("look for network namespaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	tests, err := proc.Where("cmdline", func(text string) bool { return strings.Contains(text, "\x00-test.") }) // that run Go tests
	if err != nil {
		return err
	}
	var failed error
	for tag, parts := range deadClusters(names, tests) {
		b.Logf("remove %s, which a run before has left", tag)
		failed = errors.Join(failed, sweepCluster(ctx, tag, parts))
	}
	return errors.Join(failed, sweepFiles("/tmp/bcl-*", tests))
}

// sweepFiles removes the directories of clusters in which no test process has a file open. Those
// that were made a moment ago may be of one that has not come to it.
func sweepFiles(pattern string, tests []int) error {
	dirs, err := filepath.Glob(pattern)
	for _, dir := range dirs {
		info, failed := os.Stat(dir)
		if failed == nil && !slices.ContainsFunc(tests, func(pid int) bool { return time.Since(info.ModTime()) < sweepTime || hasOpen(pid, dir) }) {
			failed = os.RemoveAll(dir)
		}
		if !errors.Is(failed, os.ErrNotExist) {
			err = errors.Join(err, failed)
		}
	}
	return err
}

// hasOpen reports whether a process has a file of a directory open.
func hasOpen(pid int, dir string) bool {
	fds := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(fds) // it may have gone meanwhile
	for _, e := range entries {
		if file, err := os.Readlink(filepath.Join(fds, e.Name())); err == nil && strings.HasPrefix(file, dir+"/") {
			return true
		}
	}
	return false
}

// deadClusters are the namespaces by tag whose owner is none of the test processes that live.
func deadClusters(namespaces []string, tests []int) map[string][]string {
	dead := map[string][]string{}
	for _, ns := range namespaces {
		m := clusterName.FindStringSubmatch(ns)
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[2])
		if err != nil || slices.ContainsFunc(tests, func(pid int) bool { return n > pid%20*10 }) {
			continue
		}
		dead[m[1]] = append(dead[m[1]], ns)
	}
	return dead
}

func sweepCluster(ctx context.Context, tag string, namespaces []string) error {
	var failed error
	for _, ns := range namespaces {
		out, err := exec.CommandContext(ctx, "ip", "netns", "pids", ns).Output()
		failed = errors.Join(failed, err)
		for text := range strings.FieldsSeq(string(out)) {
			pid, err := strconv.Atoi(text)
			if err != nil || pid <= 1 {
				continue
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); !errors.Is(err, syscall.ESRCH) {
				failed = errors.Join(failed, err)
			}
		}
		failed = errors.Join(failed, exec.CommandContext(ctx, "ip", "netns", "del", ns).Run())
	}
	// Neither need be there.
	_ = exec.CommandContext(ctx, "nft", "delete", "table", "bridge", tag).Run()
	_ = exec.CommandContext(ctx, "ip", "link", "del", tag).Run()
	if failed != nil {
		return fmt.Errorf("remove %s: %w", tag, failed)
	}
	return nil
}
