package programs

import (
	"os"

	"golang.org/x/sys/unix"
)

// readInLargePages reads a program into the page cache, in pages of 2 MiB where the kernel and the file system can. The kernel maps
// 64 KiB of small pages at a time, so a process of runsc takes hundreds of faults as it starts, a tenth of its processor time.
// What is cached already stays as it is. A fresh copy is cached as it was written, in small pages, so it is evicted first;
// it must be on disk.
func readInLargePages(path string, fresh bool) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return err
	}
	if fresh {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return os.NewSyscallError("fadvise", err)
		}
	}
	pages, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	defer func() { _ = unix.Munmap(pages) }()
	if err := unix.Madvise(pages, unix.MADV_HUGEPAGE); err != nil {
		return os.NewSyscallError("madvise", err) // a kernel may have none
	}
	return os.NewSyscallError("madvise", unix.Madvise(pages, unix.MADV_POPULATE_READ))
}
