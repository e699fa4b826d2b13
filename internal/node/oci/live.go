package oci

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// What runsc checkpoint does for a container that is left running: one call to the sandbox's kernel,
// over its control socket, with three files. It is made from here where something is to be done
// while the container stands still. The kernel stops for the time of its saving anyway, and as the
// first of the files, which takes the kernel's own state and comes to its end last of all that
// matters, is a pipe, that time ends when we have read it.
//
// So nothing has to be paused beforehand or resumed afterwards, which would take three starts of
// runsc, all of them while the container stands still. And whatever becomes of us, it goes on: without
// a reader the kernel gives the saving up.
const (
	saveMethod = "containerManager.Checkpoint"
	stateFile  = "checkpoint.img"
	metaFile   = "pages_meta.img"
	pagesFile  = "pages.img"
	stateMagic = "gVisorSF"
	// maxStateHead bounds what stands before the state, as gVisor does.
	maxStateHead = 16 << 20
	// The pipe holds no more than a page until it may be read, and much then.
	narrowPipe, widePipe = 4 << 10, 1 << 20
)

// errNotLive is why a container cannot be saved this way; nothing has been done to it then.
var errNotLive = errors.New("it cannot be saved over its control socket")

// saveLive writes an image of a running container and calls written while it stands still, for
// which time it returns. An errNotLive means that written was not called.
func (r *Runtime) saveLive(ctx context.Context, id, part string, direct bool, written func(context.Context) error) (still time.Duration, err error) {
	files, err := createSaveFiles(part, direct)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, closeAll(files)) }()
	from, to, err := pipe()
	if err != nil {
		return 0, err
	}
	defer func() { _ = from.Close() }()
	conn, err := r.dialControl(ctx, id)
	if err != nil {
		_ = unix.Close(to)
		return 0, fmt.Errorf("%w: %w", errNotLive, err)
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _, _ = from.Close(), conn.Close() })()
	began := time.Now()
	err = callSave(conn, to, int(files[1].Fd()), int(files[2].Fd()))
	_ = unix.Close(to) // the kernel has its own
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errNotLive, err)
	}
	rest, failed := copyState(ctx, files[0], from, written)
	if failed != nil {
		_ = from.Close() // and so ends the saving
	}
	err = saveResult(conn)
	switch cause := context.Cause(ctx); {
	case cause != nil:
		return 0, cause
	case errors.Is(failed, errNotLive):
		return 0, errors.Join(failed, err)
	case failed != nil:
		return 0, failed
	case err != nil:
		return 0, err
	case rest <= narrowPipe: // it may all have been in the pipe, and nobody had to wait
		return 0, fmt.Errorf("its kernel's state has %d bytes, too few to have held it: %w", rest, errs.ErrUnavailable)
	}
	return time.Since(began), nil
}

// copyState takes the kernel's state to its file, and calls written in between: when the first of it
// is there, all files have been flushed, and until the last has been read, nothing goes on. The rest is
// how many bytes came after that.
func copyState(ctx context.Context, file, from *os.File, written func(context.Context) error) (rest int64, err error) {
	head := make([]byte, len(stateMagic)+8)
	if _, err := io.ReadFull(from, head); err != nil {
		return 0, fmt.Errorf("%w: read head: %w", errNotLive, err)
	}
	size := binary.BigEndian.Uint64(head[len(stateMagic):])
	if string(head[:len(stateMagic)]) != stateMagic || size > maxStateHead {
		return 0, fmt.Errorf("%w: %q is no head that is known", errNotLive, head)
	}
	head = append(head, make([]byte, size+1)...) // and the first byte of the state
	if _, err := io.ReadFull(from, head[len(head)-int(size)-1:]); err != nil {
		return 0, fmt.Errorf("%w: read head: %w", errNotLive, err)
	}
	if err := written(ctx); err != nil {
		return 0, err
	}
	if err := sizePipe(from, widePipe); err != nil {
		return 0, err
	}
	if _, err := file.Write(head); err != nil {
		return 0, err
	}
	return io.Copy(file, from)
}

// createSaveFiles makes the files of an image, as runsc names them.
func createSaveFiles(part string, direct bool) (files []*os.File, err error) {
	for _, name := range []string{stateFile, metaFile, pagesFile} {
		flags := os.O_RDWR | os.O_CREATE | os.O_EXCL
		if direct && name == pagesFile {
			flags |= unix.O_DIRECT
		}
		f, err := os.OpenFile(filepath.Join(part, name), flags, 0o600)
		if err != nil {
			return nil, errors.Join(err, closeAll(files))
		}
		files = append(files, f)
	}
	return files, nil
}

func closeAll(files []*os.File) (err error) {
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// pipe makes a narrow one. Its writers wait as those of files do, its reader as those of sockets.
func pipe() (from *os.File, to int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, fmt.Errorf("make pipe: %w", err)
	}
	if err := unix.SetNonblock(p[0], true); err != nil {
		return nil, 0, errors.Join(fmt.Errorf("make pipe: %w", err), unix.Close(p[0]), unix.Close(p[1]))
	}
	from = os.NewFile(uintptr(p[0]), "state")
	if err := sizePipe(from, narrowPipe); err != nil {
		return nil, 0, errors.Join(err, from.Close(), unix.Close(p[1]))
	}
	return from, p[1], nil
}

func sizePipe(f *os.File, size int) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("size pipe: %w", err)
	}
	var failed error
	if err := conn.Control(func(fd uintptr) { _, failed = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, size) }); err != nil {
		return fmt.Errorf("size pipe: %w", err)
	}
	if failed != nil && size == narrowPipe {
		return fmt.Errorf("size pipe: %w", failed)
	}
	return nil // one that stays narrow is only slow
}

// dialControl connects to a sandbox's kernel. The path may be longer than that of a socket may be.
func (r *Runtime) dialControl(ctx context.Context, id string) (*net.UnixConn, error) {
	path := r.statePaths(id)[2]
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// callSave asks the kernel to save itself and to run on.
func callSave(conn *net.UnixConn, files ...int) error {
	type argument struct {
		Metadata      map[string]string `json:"metadata"`
		HavePagesFile bool              `json:"have_pages_file"`
		Resume        bool              `json:"Resume"`
	}
	b, err := json.Marshal(struct {
		Method string   `json:"method"`
		Arg    argument `json:"arg"`
	}{saveMethod, argument{map[string]string{"compression": "none"}, true, true}})
	if err != nil {
		return err
	}
	n, _, err := conn.WriteMsgUnix(b, unix.UnixRights(files...), nil)
	if err == nil && n < len(b) {
		_, err = conn.Write(b[n:])
	}
	return err
}

// saveResult waits for the answer.
func saveResult(conn *net.UnixConn) error {
	var result struct {
		Success bool   `json:"success"`
		Err     string `json:"err"`
	}
	if err := json.NewDecoder(conn).Decode(&result); err != nil {
		return fmt.Errorf("read answer to %s: %w", saveMethod, err)
	}
	if !result.Success {
		first, _, _ := strings.Cut(string(bytes.TrimSpace([]byte(result.Err))), "\n")
		return fmt.Errorf("%s: %s", saveMethod, shorten(first))
	}
	return nil
}
