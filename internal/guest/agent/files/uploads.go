package files

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// stagePrefix begins the name of a file that is not complete yet. Listings and
// watches leave such files out.
const stagePrefix = ".barchan-upload-"

// placedFor bounds the delay between an upload and its inotify event.
const placedFor = 10 * time.Second

func isStaged(path string) bool { return strings.HasPrefix(filepath.Base(path), stagePrefix) }

// Uploads places files atomically. It records recent uploads, so that a watch can distinguish a
// replaced file (a write, to the client) from a new one: a rename creates both.
type Uploads struct {
	mu     sync.Mutex
	last   uint64              // +checklocks:mu
	placed map[string][]placed // +checklocks:mu
}

// placed is one upload to a path.
type placed struct {
	at       time.Time
	number   uint64 // later ones have greater ones
	replaced bool
}

// NewUploads returns an empty record.
func NewUploads() *Uploads { return &Uploads{placed: map[string][]placed{}} }

// put writes a file, with its parents, as the user's.
func (u *Uploads) put(path string, content io.Reader, acc account.User, metadata map[string]string) error {
	if err := account.MakeDirs(filepath.Dir(path), acc); err != nil {
		return err
	}
	target, old, err := uploadTarget(path)
	if err != nil {
		return err
	}
	if old != nil && !old.Mode().IsRegular() {
		return writeInto(target, content) // a device, a pipe
	}
	stage, err := u.stage(target, old, content, acc, metadata)
	if err != nil {
		return err
	}
	number := u.remember(target, old != nil)
	err = os.Rename(stage, target)
	if err == nil {
		return nil
	}
	u.forget(target, number)
	if errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EXDEV) {
		err = u.overwrite(stage, target, acc, metadata) // the file is a mount point
	} else {
		err = fmt.Errorf("place file: %w", err)
	}
	return errors.Join(err, os.Remove(stage))
}

// uploadTarget follows links to where the content goes. old is nil if nothing is there.
func uploadTarget(path string) (target string, old os.FileInfo, err error) {
	target = path
	if end, err := filepath.EvalSymlinks(path); err == nil {
		target = end
	} else if to := linkTarget(path); to != nil {
		target = *to // a dangling link
	}
	st, err := os.Stat(target)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return target, nil, nil
	case err != nil:
		return "", nil, fmt.Errorf("stat file: %w", err)
	case st.IsDir():
		return "", nil, &os.PathError{Op: "write", Path: path, Err: syscall.EISDIR}
	}
	return target, st, nil
}

// stage writes a complete file beside its target.
func (u *Uploads) stage(target string, old os.FileInfo, content io.Reader, acc account.User, metadata map[string]string) (string, error) {
	mode := os.FileMode(0o644)
	if old != nil {
		mode = old.Mode().Perm()
	}
	stage := filepath.Join(filepath.Dir(target), stagePrefix+rand.Text())
	f, err := os.OpenFile(stage, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", fmt.Errorf("create file: %w", err)
	}
	err = copyAll(f, content)
	if err == nil {
		err = errors.Join(setMetadata(f, metadata), f.Chown(int(acc.UID), int(acc.GID)), f.Chmod(mode))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(fmt.Errorf("write file: %w", err), os.Remove(stage))
	}
	return stage, nil
}

// overwrite copies a complete file over one that cannot be replaced.
func (u *Uploads) overwrite(stage, target string, acc account.User, metadata map[string]string) error {
	src, err := os.Open(stage)
	if err != nil {
		return fmt.Errorf("open staged file: %w", err)
	}
	defer func() { _ = src.Close() }()
	dst, err := os.OpenFile(target, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return fmt.Errorf("open file: %w", err)
	}
	_, err = io.Copy(dst, src)
	for _, name := range xattrNames(target) {
		if strings.HasPrefix(name, envd.XattrMetadataPrefix) {
			err = errors.Join(err, unix.Fremovexattr(int(dst.Fd()), name))
		}
	}
	err = errors.Join(err, setMetadata(dst, metadata), dst.Chown(int(acc.UID), int(acc.GID)), dst.Close())
	if err != nil {
		return fmt.Errorf("write file: %w", err)
	}
	return nil
}

// writeInto writes to a device or pipe.
func writeInto(path string, content io.Reader) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("open file: %w", err)
	}
	_, err = io.Copy(f, content)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write file: %w", err)
	}
	return nil
}

// copyBuffers are large: a system call of a sandbox's kernel is expensive.
var copyBuffers = sync.Pool{New: func() any { return new([copyBuffer]byte) }}

const copyBuffer = 512 << 10

// copyAll copies in large pieces.
func copyAll(to io.Writer, from io.Reader) error {
	buf, ok := copyBuffers.Get().(*[copyBuffer]byte)
	if !ok {
		buf = new([copyBuffer]byte)
	}
	defer copyBuffers.Put(buf)
	// Hides ReadFrom, which copies in small pieces.
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, from, buf[:])
	return err
}

func setMetadata(f *os.File, metadata map[string]string) error {
	for k, v := range metadata {
		if err := unix.Fsetxattr(int(f.Fd()), envd.XattrMetadataPrefix+k, []byte(v), 0); err != nil {
			return fmt.Errorf("set metadata %s: %w", k, err)
		}
	}
	return nil
}

// remember records an upload before its rename, and drops old records.
func (u *Uploads) remember(path string, replaced bool) (number uint64) {
	now := time.Now()
	u.mu.Lock()
	defer u.mu.Unlock()
	for p, list := range u.placed {
		if now.Sub(list[len(list)-1].at) > placedFor {
			delete(u.placed, p)
		}
	}
	u.last++
	list := slices.DeleteFunc(u.placed[path], func(p placed) bool { return now.Sub(p.at) > placedFor })
	u.placed[path] = append(list, placed{at: now, number: u.last, replaced: replaced})
	return u.last
}

// forget removes a record after a failed rename.
func (u *Uploads) forget(path string, number uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := slices.DeleteFunc(u.placed[path], func(p placed) bool { return p.number == number })
	if len(list) == 0 {
		delete(u.placed, path)
		return
	}
	u.placed[path] = list
}

// lookup returns the first recent upload to a path after the numbered one, or else the last one.
func (u *Uploads) lookup(path string, after uint64) (placed, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := u.placed[path]
	if len(list) == 0 || time.Since(list[len(list)-1].at) > placedFor {
		return placed{}, false
	}
	for _, p := range list {
		if p.number > after {
			return p, true
		}
	}
	return list[len(list)-1], true
}
