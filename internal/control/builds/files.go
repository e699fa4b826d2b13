package builds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// chunk is how many bytes of an archive are read at once.
const chunk = 256 << 10

// MaxFiles returns the most bytes of one archive.
func (s *Store) MaxFiles() int64 { return s.cfg.MaxFiles }

// HasFiles reports whether an archive is kept. That counts as a use.
func (s *Store) HasFiles(namespace, hash string) bool {
	return s.use(archive{namespace, hash})
}

// use notes that an archive is used now, also for later processes; false if there is none.
func (s *Store) use(a archive) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	st, has := s.archives[a]
	if !has {
		return false
	}
	st.used = time.Now()
	err := os.Chtimes(s.path(a), time.Time{}, st.used)
	if errors.Is(err, fs.ErrNotExist) { // removed by hand
		_ = s.removeLocked(a) // which has no file to remove
		return false
	}
	return true
}

// Files opens an archive; none is an errs.ErrNotFound. The caller closes it, and can read it to the end even if it is
// removed meanwhile.
func (s *Store) Files(namespace, hash string) (*os.File, error) {
	a := archive{namespace, hash}
	if !s.use(a) {
		return nil, fmt.Errorf("archive %.64s of %.64s: %w", hash, namespace, errs.ErrNotFound)
	}
	f, err := os.Open(s.path(a))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", errs.ErrNotFound, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open archive: %w", err)
	}
	return f, nil
}

// PutFiles keeps an archive, in place of an earlier one of that hash. Unless r is read to its end, nothing changes. One that
// is too large is an errs.ErrTooLarge, one for which there is no room an errs.ErrExhausted.
func (s *Store) PutFiles(ctx context.Context, namespace, hash string, r io.Reader) (err error) {
	a := archive{namespace, hash}
	if err := a.check(); err != nil {
		return err
	}
	dir := filepath.Dir(s.path(a))
	if err := makeDir(dir); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, partial)
	if err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	w := &upload{store: s, ctx: ctx, file: f}
	if _, err = io.CopyBuffer(w, r, make([]byte, chunk)); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = s.keep(a, f.Name(), w.size)
	}
	if err == nil {
		err = durable.SyncDirs(dir, s.files)
	} else {
		s.release(w.size)
		_ = os.Remove(f.Name()) // the error below matters more
	}
	if err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	return nil
}

// upload is an archive that is being written.
type upload struct {
	store *Store
	ctx   context.Context //nolint:containedctx // of the one call whose writer it is
	file  *os.File
	size  int64 // for which there is room, whatever the last error
}

// Write implements io.Writer.
func (u *upload) Write(b []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	if most := u.store.cfg.MaxFiles; u.size+int64(len(b)) > most {
		return 0, errs.Public(errs.ErrTooLarge, fmt.Sprintf("the archive is larger than %d bytes", most))
	}
	if err := u.store.reserve(int64(len(b))); err != nil {
		return 0, err
	}
	u.size += int64(len(b))
	return u.file.Write(b)
}

// reserve makes room for n more bytes of an upload.
func (s *Store) reserve(n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.shrinkLocked(n); err != nil {
		return err
	}
	s.total += n
	return nil
}

// release gives back the room of an upload that failed.
func (s *Store) release(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total -= n
}

// keep names an archive that is complete.
func (s *Store) keep(a archive, written string, size int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Rename(written, s.path(a)); err != nil {
		return err
	}
	if before, has := s.archives[a]; has {
		s.total -= before.size
	}
	s.archives[a] = &state{size: size, used: time.Now()}
	return nil
}
