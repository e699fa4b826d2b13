package programs

import (
	"os"

	"golang.org/x/sys/unix"
)

// readInLargePages reads a program into the page cache, in pages of 2 MiB where the kernel and the file system can. The kernel maps
// 64 KiB of small pages at a time, so a process of runsc takes hundreds of faults as it starts, a tenth of its processor time.
// What is cached already stays as it is.
func readInLargePages(path string) error {
	pages, err := mapInLargePages(path)
	if err != nil {
		return err
	}
	return os.NewSyscallError("munmap", unix.Munmap(pages))
}

// mapInLargePages is readInLargePages, with the program mapped until the caller unmaps it. A kernel may have no large pages.
func mapInLargePages(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	pages, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	for _, advice := range []int{unix.MADV_HUGEPAGE, unix.MADV_POPULATE_READ} {
		if err := unix.Madvise(pages, advice); err != nil {
			_ = unix.Munmap(pages)
			return nil, os.NewSyscallError("madvise", err)
		}
	}
	return pages, nil
}

// evict removes a file, which is on disk, from the page cache. What was written is cached in small pages.
func evict(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return os.NewSyscallError("fadvise", unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}
