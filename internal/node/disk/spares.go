package disk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	maxSpares   = 2
	sparePrefix = "spare-"
	spareRetry  = 10 * time.Second
)

// spare is an empty disk that is mounted at a directory of the store: attaching a loop device and reading a file system take longer than
// all else of a disk.
type spare struct {
	image, dir, device string
}

// KeepSpares makes disks of a size ahead, for the next ones of that size, until ctx is done.
func (s *Store) KeepSpares(ctx context.Context, bytes int64, log *slog.Logger) {
	if s.fault != nil {
		return
	}
	s.spareSize.Store(sizeOf(bytes))
	defer s.dropSpares()
	for n := 0; ctx.Err() == nil; n++ {
		one, err := s.makeSpare(ctx, n, bytes)
		if err != nil {
			if ctx.Err() == nil {
				log.WarnContext(ctx, "spare disk not made", telemetry.Error, err)
			}
			lifecycle.Sleep(ctx, spareRetry)
			continue
		}
		select {
		case s.spares <- one:
		case <-ctx.Done():
			s.drop(one)
		}
	}
}

func (s *Store) makeSpare(ctx context.Context, n int, bytes int64) (one spare, err error) {
	name := filepath.Join(s.dir, fmt.Sprintf("%s%d", sparePrefix, n))
	one = spare{image: name + "-image", dir: name}
	if err = s.make(ctx, one.image, bytes); err == nil {
		if err = os.MkdirAll(one.dir, 0o711); err == nil {
			one.device, err = attach(one.image, one.dir, true)
		}
	}
	if err != nil {
		s.drop(one)
	}
	return one, err
}

// takeSpare gives a spare disk the name of an image and mounts it at a directory, if there is one of the size.
func (s *Store) takeSpare(image, dir string, size int64) (taken bool, err error) {
	if size != s.spareSize.Load() {
		return false, nil
	}
	var one spare
	select {
	case one = <-s.spares:
	default:
		return false, nil
	}
	if err := os.Rename(one.image, image); err != nil { // on another file system
		s.drop(one)
		return false, nil //nolint:nilerr // one is made
	}
	err = unix.Mount(one.device, dir, "ext4", mountFlags, mountOptions) // the file system is there: this only adds a place
	if err == nil {
		err = Unmount(one.dir)
	}
	return true, errors.Join(err, removeFile(one.dir))
}

func (s *Store) dropSpares() {
	for {
		select {
		case one := <-s.spares:
			s.drop(one)
		default:
			return
		}
	}
}

// drop removes a spare; what fails is removed by the next Open.
func (s *Store) drop(one spare) {
	if Discard(one.dir) == nil {
		_, _ = removeFile(one.dir), removeFile(one.image)
	}
}

// sweepSpares removes those of an earlier process. One may have been given away in its last moment: it is only unmounted here.
func (s *Store) sweepSpares() error {
	err := eachMounted(s.dir, Unmount)
	for _, path := range globs(s.dir, sparePrefix+"*") {
		err = errors.Join(err, removeFile(path))
	}
	return err
}
