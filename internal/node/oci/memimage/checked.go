package memimage

import (
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

// checkedName is the extended attribute of a file whose checksums were compared, or computed as it was written, since the
// machine started. Its value is that of mark.
const checkedName = "user.barchan.checked"

// mark identifies the content that was checked: the file, its last change, its checksums, and the start of the machine. A
// copy on another inode has none.
func (f File) mark(info fs.FileInfo) []byte {
	table := crc32.New(castagnoli)
	_, _ = fmt.Fprint(table, f.CRC32C)
	return fmt.Appendf(nil, "%s %d %d %08x", lifecycle.BootID(), info.Sys().(*syscall.Stat_t).Ino, info.ModTime().UnixNano(), table.Sum32())
}

// setChecked marks a file. A file system without extended attributes has its files verified each time.
func (f File) setChecked(path string, info fs.FileInfo) {
	if lifecycle.BootID() != "" {
		_ = unix.Setxattr(path, checkedName, f.mark(info), 0)
	}
}

// checked reports whether a file has the mark, and is in the page cache as a whole: then a restore reads what was checked,
// and not the disk. Linux before 6.5 does not tell.
func (f File) checked(path string, info fs.FileInfo) bool {
	var value [128]byte
	n, err := unix.Getxattr(path, checkedName, value[:])
	if err != nil || string(value[:n]) != string(f.mark(info)) {
		return false
	}
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	var stat unix.Cachestat_t // a length of zero is to the end of the file
	err = unix.Cachestat(uint(file.Fd()), &unix.CachestatRange{}, &stat, 0)
	return err == nil && int64(stat.Cache) >= chunks(f.Size, int64(os.Getpagesize()))
}
