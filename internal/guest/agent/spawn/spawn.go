package spawn

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/plainfile"
)

// oomScore makes the OOM killer choose a sandbox's programs before the agent.
const oomScore = 100

// Command is a program to start.
type Command struct {
	Argv  []string
	Env   map[string]string
	Dir   string
	User  account.User
	Files [3]*os.File // opened by package os, or blocking
	TTY   bool        // the first file is a terminal to take control of
}

// Spawn starts a command in its own session.
func (r *Reaper) Spawn(c Command) (int, <-chan syscall.WaitStatus, error) {
	path, err := findProgram(c.Argv[0], c.Env["PATH"], c.Dir)
	if err != nil {
		return 0, nil, err
	}
	attr := &syscall.ProcAttr{
		Dir: c.Dir,
		Env: envList(c.Env),
		Files: []uintptr{
			c.Files[0].Fd(), c.Files[1].Fd(), c.Files[2].Fd(), // Fd makes what os opened block, as programs expect
		},
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: c.TTY},
	}
	if os.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: c.User.UID, Gid: c.User.GID, Groups: c.User.Groups}
	} else if int(c.User.UID) != os.Geteuid() {
		return 0, nil, fmt.Errorf("run as %s: the agent is not root: %w", c.User.Name, syscall.EPERM)
	}
	pid, done, err := r.start(path, c.Argv, attr)
	if err != nil {
		return 0, nil, err
	}
	if c.User.UID == 0 {
		r.keepReserve(pid)
	}
	// A sandbox may forbid it, and the program may have ended: both are fine.
	_ = plainfile.Write("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(oomScore)))
	return pid, done, nil
}

// findProgram finds a program as a shell does in dir with the PATH given.
func findProgram(name, path, dir string) (string, error) {
	if name == "" {
		return "", &exec.Error{Name: name, Err: errors.New("the program's name is empty")}
	}
	if strings.ContainsRune(name, '/') {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		return name, nil
	}
	reason := exec.ErrNotFound
	for _, d := range filepath.SplitList(path) {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		file := filepath.Join(d, name)
		st, err := os.Stat(file)
		switch {
		case err != nil || !st.Mode().IsRegular():
		case st.Mode()&0o111 != 0:
			return file, nil
		default:
			reason = syscall.EACCES
		}
	}
	return "", &exec.Error{Name: name, Err: reason}
}

// Stdio is both ends of a process's files.
type Stdio struct {
	Child  [3]*os.File
	Stdin  *os.File // nil with /dev/null or a terminal
	Stdout *os.File // nil with a terminal
	Stderr *os.File
	TTY    *os.File // nil without a terminal
	opened []*os.File
}

// CloseChild closes the ends that the child has copies of.
func (s *Stdio) CloseChild() {
	for _, f := range s.Child {
		if f != nil {
			// The child has its copy, or was never started; nothing was written.
			_ = f.Close()
		}
	}
}

// CloseAll undoes the opening after a failed start.
func (s *Stdio) CloseAll() {
	for _, f := range s.opened {
		_ = f.Close()
	}
}

// OpenPipes makes pipes that the user may also open by name (/dev/stdout).
func OpenPipes(acc account.User, withStdin bool) (*Stdio, error) {
	s := &Stdio{}
	pipe := func(written int) (child, own *os.File, err error) {
		if child, own, err = openPipe(acc, written); err == nil {
			s.opened = append(s.opened, child, own)
		}
		return child, own, err
	}
	var errs [3]error
	if withStdin {
		s.Child[0], s.Stdin, errs[0] = pipe(byAgent)
	} else if s.Child[0], errs[0] = os.Open(os.DevNull); errs[0] == nil {
		s.opened = append(s.opened, s.Child[0])
	}
	s.Child[1], s.Stdout, errs[1] = pipe(byChild)
	s.Child[2], s.Stderr, errs[2] = pipe(byChild)
	if err := errors.Join(errs[:]...); err != nil {
		s.CloseAll()
		return nil, fmt.Errorf("open pipes: %w", err)
	}
	return s, nil
}

// Who writes to a pipe; also the index of the child's end in what pipe2(2) returns.
const byAgent, byChild = 0, 1

// openPipe makes a pipe whose own end can be polled and whose child's end blocks, as programs expect. os.Pipe makes both pollable, which
// takes twice as many system calls with those that undo it.
func openPipe(acc account.User, written int) (child, own *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	// Some kernels refuse; then only root opens /dev/stdout by name.
	_ = unix.Fchown(fds[1], int(acc.UID), int(acc.GID))
	mine := fds[1-written]
	if _, err := unix.FcntlInt(uintptr(mine), unix.F_SETFL, unix.O_NONBLOCK); err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[written]), "|child"), os.NewFile(uintptr(mine), "|agent"), nil
}

// OpenTerminal makes a terminal that belongs to the user.
func OpenTerminal(acc account.User, size *unix.Winsize) (*Stdio, error) {
	ptmx, tty, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open terminal: %w", err)
	}
	s := &Stdio{Child: [3]*os.File{tty, tty, tty}, opened: []*os.File{ptmx, tty}}
	if s.TTY, err = pollable(ptmx); err == nil {
		s.opened[0] = s.TTY
		err = Resize(s.TTY, size)
	}
	if err != nil {
		s.CloseAll()
		return nil, fmt.Errorf("prepare terminal: %w", err)
	}
	// Some kernels refuse; then only root opens the terminal by name.
	_ = tty.Chown(int(acc.UID), int(acc.GID))
	return s, nil
}

// pollable turns a blocking file into one with deadlines; f is closed.
func pollable(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate: %w", err)
	}
	if err := errors.Join(unix.SetNonblock(fd, true), f.Close()); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// Resize sets a terminal's size; nil leaves it.
func Resize(tty *os.File, size *unix.Winsize) error {
	if size == nil {
		return nil
	}
	// Not through Fd, which would make the file block.
	conn, err := tty.SyscallConn()
	if err != nil {
		return fmt.Errorf("resize: %w", err)
	}
	var ierr error
	err = conn.Control(func(fd uintptr) { ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, size) })
	if err = errors.Join(err, ierr); err != nil {
		return fmt.Errorf("resize: %w", err)
	}
	return nil
}

// envList is an environment as the kernel takes it, in a fixed order.
func envList(env map[string]string) []string {
	list := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	return list
}
