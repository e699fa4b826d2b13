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

// A live save, of a container that is left running, is one call to the sandbox's kernel over its
// control socket, with three files, as runsc checkpoint makes it. The kernel stops while it saves.
// The first file receives the kernel's state, whose end is written last; it is a pipe here, so the
// kernel stays stopped until this process has read it.
//
// So no pause and resume is needed, which would take three starts of runsc while the container is
// stopped. If this process exits, the container continues: without a reader the kernel cancels the
// save.
const (
	saveMethod = "containerManager.Checkpoint"
	stateFile  = "checkpoint.img"
	metaFile   = "pages_meta.img"
	pagesFile  = "pages.img"
	stateMagic = "gVisorSF"
	// maxStateHead bounds the header of the state, as gVisor does.
	maxStateHead = 16 << 20
	// The pipe holds at most a page until the state may be read, and much then.
	narrowPipe, widePipe = 4 << 10, 1 << 20
)

// errNotLive means that a container cannot be saved this way, and is unchanged.
var errNotLive = errors.New("cannot be saved over its control socket")

// saveLive writes an image of a running container, calls written while it is stopped, and returns
// for how long it was. An errNotLive means that written was not called.
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
	_ = unix.Close(to) // the kernel has its own copy
	if err != nil {
		return 0, fmt.Errorf("%w: %w", errNotLive, err)
	}
	rest, failed := copyState(ctx, files[0], from, written)
	if failed != nil {
		_ = from.Close() // ends the save
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
	case rest <= narrowPipe: // all of it may have fit into the pipe
		return 0, fmt.Errorf("kernel state of %d bytes is too small to stop the kernel: %w", rest, errs.ErrUnavailable)
	}
	return time.Since(began), nil
}

// copyState copies the kernel's state to its file, and calls written in between: when the first
// byte arrives all files are flushed, and the kernel stays stopped until the last is read. rest is
// the number of bytes after that.
func copyState(ctx context.Context, file, from *os.File, written func(context.Context) error) (rest int64, err error) {
	head := make([]byte, len(stateMagic)+8)
	if _, err := io.ReadFull(from, head); err != nil {
		return 0, fmt.Errorf("%w: read head: %w", errNotLive, err)
	}
	size := binary.BigEndian.Uint64(head[len(stateMagic):])
	if string(head[:len(stateMagic)]) != stateMagic || size > maxStateHead {
		return 0, fmt.Errorf("%w: unknown head %q", errNotLive, head)
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

// createSaveFiles creates the files of an image, as runsc names them.
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

// pipe creates a narrow one. Writers block as for files, the reader as for sockets.
func pipe() (from *os.File, to int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, fmt.Errorf("create pipe: %w", err)
	}
	if err := unix.SetNonblock(p[0], true); err != nil {
		return nil, 0, errors.Join(fmt.Errorf("create pipe: %w", err), unix.Close(p[0]), unix.Close(p[1]))
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
	return nil // a narrow pipe is only slow
}

// dialControl connects to a sandbox's kernel. The path may be longer than a socket address.
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

// callSave requests that the kernel saves itself and continues.
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

func saveResult(conn *net.UnixConn) error {
	var result struct {
		Success bool   `json:"success"`
		Err     string `json:"err"`
	}
	if err := json.NewDecoder(conn).Decode(&result); err != nil {
		return fmt.Errorf("read response to %s: %w", saveMethod, err)
	}
	if !result.Success {
		first, _, _ := strings.Cut(string(bytes.TrimSpace([]byte(result.Err))), "\n")
		return fmt.Errorf("%s: %s", saveMethod, shorten(first))
	}
	return nil
}
