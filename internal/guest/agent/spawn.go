package agent

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// oomScore makes the kernel prefer a sandbox's programs to the agent.
const oomScore = 100

// command is a program to start.
type command struct {
	argv  []string
	env   map[string]string
	dir   string
	acc   account
	files [3]*os.File
	tty   bool // the first file is a terminal to take control of
}

// spawn starts a command in a session of its own.
func (r *reaper) spawn(c command) (int, <-chan syscall.WaitStatus, error) {
	path, err := findProgram(c.argv[0], c.env["PATH"], c.dir)
	if err != nil {
		return 0, nil, err
	}
	for _, f := range c.files {
		// A program does not expect its files to refuse to wait.
		if err := unix.SetNonblock(int(f.Fd()), false); err != nil {
			return 0, nil, fmt.Errorf("prepare files: %w", err)
		}
	}
	attr := &syscall.ProcAttr{
		Dir: c.dir,
		Env: envList(c.env),
		Files: []uintptr{
			c.files[0].Fd(), c.files[1].Fd(), c.files[2].Fd(),
		},
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: c.tty},
	}
	if os.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: c.acc.uid, Gid: c.acc.gid, Groups: c.acc.groups}
	} else if int(c.acc.uid) != os.Geteuid() {
		return 0, nil, fmt.Errorf("run as %s: the agent is not root: %w", c.acc.name, syscall.EPERM)
	}
	pid, done, err := r.start(path, c.argv, attr)
	if err != nil {
		return 0, nil, err
	}
	if c.acc.uid == 0 {
		r.keepReserve(pid)
	}
	// A sandbox may forbid it, and the program may have ended: both are fine.
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(oomScore)), 0)
	return pid, done, nil
}

// findProgram looks a program up as a shell would in dir with the PATH given.
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

// stdio is both ends of a process's files.
type stdio struct {
	child  [3]*os.File
	stdin  *os.File // nil with /dev/null or a terminal
	stdout *os.File // nil with a terminal
	stderr *os.File
	tty    *os.File // nil without a terminal
	opened []*os.File
}

// closeChild closes the ends that the child has copies of.
func (s *stdio) closeChild() {
	for _, f := range s.child {
		if f != nil {
			// The child has its copy, or was never started; nothing was written.
			_ = f.Close()
		}
	}
}

// closeAll undoes the opening after a failed start.
func (s *stdio) closeAll() {
	for _, f := range s.opened {
		_ = f.Close()
	}
}

// openPipes makes pipes that the user may also open by name (/dev/stdout).
func openPipes(acc account, withStdin bool) (*stdio, error) {
	s := &stdio{}
	pipe := func() (r, w *os.File, err error) {
		if r, w, err = os.Pipe(); err == nil {
			s.opened = append(s.opened, r, w)
			// Some kernels refuse; then /dev/stdout by name is root's alone.
			_ = w.Chown(int(acc.uid), int(acc.gid))
		}
		return r, w, err
	}
	var errs [3]error
	if withStdin {
		s.child[0], s.stdin, errs[0] = pipe()
	} else if s.child[0], errs[0] = os.Open(os.DevNull); errs[0] == nil {
		s.opened = append(s.opened, s.child[0])
	}
	s.stdout, s.child[1], errs[1] = pipe()
	s.stderr, s.child[2], errs[2] = pipe()
	if err := errors.Join(errs[:]...); err != nil {
		s.closeAll()
		return nil, fmt.Errorf("open pipes: %w", err)
	}
	return s, nil
}

// openTerminal makes a terminal that belongs to the user.
func openTerminal(acc account, size *unix.Winsize) (*stdio, error) {
	ptmx, tty, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open terminal: %w", err)
	}
	s := &stdio{child: [3]*os.File{tty, tty, tty}, opened: []*os.File{ptmx, tty}}
	if s.tty, err = pollable(ptmx); err == nil {
		s.opened[0] = s.tty
		err = resize(s.tty, size)
	}
	if err != nil {
		s.closeAll()
		return nil, fmt.Errorf("prepare terminal: %w", err)
	}
	// Some kernels refuse; then the terminal by name is root's alone.
	_ = tty.Chown(int(acc.uid), int(acc.gid))
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

// resize sets a terminal's size; nil leaves it.
func resize(tty *os.File, size *unix.Winsize) error {
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
