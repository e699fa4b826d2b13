package bundle

import (
	"errors"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/config"
)

// factFiles are files of the kernel and the distribution, none of which has values of users.
var factFiles = []string{
	"/etc/os-release", "/proc/meminfo", "/proc/loadavg", "/proc/uptime", "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io",
	"/proc/sys/fs/file-nr", "/proc/sys/kernel/pid_max", "/proc/sys/vm/overcommit_memory", "/sys/fs/cgroup/cgroup.controllers", "/sys/fs/cgroup/cgroup.subtree_control",
}

// facts describe a machine.
type facts struct {
	Kernel string `json:"kernel"`
	Arch   string `json:"arch"`
	CPUs   int    `json:"cpus"`
	// CgroupVersion is 2 where the unified hierarchy is mounted, else 1.
	CgroupVersion int `json:"cgroupVersion"`
	// Disks are by directory.
	Disks map[string]diskFacts `json:"disks"`
	// Files are the contents of factFiles that are there.
	Files map[string]string `json:"files"`
}

// diskFacts describe the file system of a directory, in bytes and inodes.
type diskFacts struct {
	Type       int64  `json:"type"` // magic number of statfs(2)
	Size       uint64 `json:"size"`
	Free       uint64 `json:"free"`
	Inodes     uint64 `json:"inodes"`
	InodesFree uint64 `json:"inodesFree"`
}

// machineFacts reads the facts of this machine. It returns what it read also with an error; what is not there is left out.
func machineFacts(cfg *config.Config) (_ any, note string, err error) {
	f := facts{Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), CgroupVersion: 1, Disks: map[string]diskFacts{}, Files: map[string]string{}}
	var name unix.Utsname
	if failed := unix.Uname(&name); failed != nil {
		err = failed
	}
	f.Kernel = unix.ByteSliceToString(name.Release[:]) + " " + unix.ByteSliceToString(name.Version[:])
	for _, dir := range directories(cfg) {
		var s unix.Statfs_t
		switch failed := unix.Statfs(dir, &s); {
		case failed == nil:
			f.Disks[dir] = diskFacts{s.Type, s.Blocks * uint64(s.Bsize), s.Bavail * uint64(s.Bsize), s.Files, s.Ffree}
		case !errors.Is(failed, fs.ErrNotExist):
			err = errors.Join(err, &fs.PathError{Op: "statfs", Path: dir, Err: failed})
		}
	}
	for _, file := range factFiles {
		content, failed := os.ReadFile(file)
		switch {
		case failed == nil:
			f.Files[file] = string(content)
		case !errors.Is(failed, fs.ErrNotExist) && !errors.Is(failed, unix.EOPNOTSUPP): // no pressure is measured
			err = errors.Join(err, failed)
		}
	}
	if _, ok := f.Files["/sys/fs/cgroup/cgroup.controllers"]; ok {
		f.CgroupVersion = 2
	}
	return f, "", err
}
