package memimage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// chunkSize is the size of a checksum's chunk: small enough to locate damage and to share the
	// work, large enough that the checksums of gigabytes fit a page.
	chunkSize = 8 << 20
	// readSize is the size of one read, within a processor's cache.
	readSize = 256 << 10
	// sumWorkers bounds the chunks that are read concurrently.
	sumWorkers = 4
)

func chunks(size, chunk int64) int64 { return (size + chunk - 1) / chunk }

// Verify reads an image and compares its files with their checksums. A difference is an
// errs.ErrInvalid that names the file and the bytes, and so are Read's findings; a missing image is
// an errs.ErrNotFound. For an image without checksums it is the same as Read.
//
// A file that was sealed or verified since the machine started, is unchanged, and has not left the page cache is not read
// again: a restore does not read the disk either. For others its speed is the disk's.
func Verify(ctx context.Context, dir string) error {
	img, err := Read(dir)
	if err != nil || img.ChunkSize == 0 {
		return err
	}
	var files []File
	var infos []fs.FileInfo
	for _, f := range img.Files {
		path := filepath.Join(dir, f.Name)
		info, err := os.Lstat(path)
		if err != nil {
			return fmt.Errorf("verify checkpoint %s: %w", dir, err)
		}
		if !f.checked(path, info) {
			files, infos = append(files, f), append(infos, info)
		}
	}
	sums, err := sumFiles(ctx, dir, files, img.ChunkSize, false)
	if err != nil {
		return fmt.Errorf("verify checkpoint %s: %w", dir, err)
	}
	for i, f := range files {
		for j, want := range f.CRC32C {
			if sums[i][j].crc != want {
				from := int64(j) * img.ChunkSize
				return fmt.Errorf("checkpoint %s: %s is damaged between the bytes %d and %d: %w",
					dir, f.Name, from, min(from+img.ChunkSize, f.Size)-1, errs.ErrInvalid)
			}
		}
		f.setChecked(filepath.Join(dir, f.Name), infos[i])
	}
	return nil
}

// Digest reads an image and returns a digest of its build and all its files, as "sha256:" and
// hexadecimal, for callers that store the digest apart from the image. [Verify] is cheaper.
func Digest(ctx context.Context, dir string) (string, error) {
	img, err := Read(dir)
	if err != nil {
		return "", err
	}
	sums, err := sumFiles(ctx, dir, img.Files, chunkSize, true)
	if err != nil {
		return "", fmt.Errorf("digest of checkpoint %s: %w", dir, err)
	}
	return img.digest(sums), nil
}

// digest covers the image's build, its files' names and sizes, and their chunks' digests.
func (i Image) digest(sums [][]sum) string {
	all := sha256.New()
	_, _ = fmt.Fprintf(all, "%s %s %s\n", i.Build.SHA256, i.Build.Arch, i.Compression)
	for n, f := range i.Files {
		_, _ = fmt.Fprintf(all, "%s %d\n", f.Name, f.Size)
		for _, s := range sums[n] {
			_, _ = all.Write(s.sha256)
		}
	}
	return "sha256:" + hex.EncodeToString(all.Sum(nil))
}

// sum has the checksums of a chunk.
type sum struct {
	crc    uint32
	sha256 []byte // nil unless requested
}

func sumFiles(ctx context.Context, dir string, files []File, chunk int64, digest bool) ([][]sum, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	type task struct{ file, chunk int }
	tasks, sums := make(chan task), make([][]sum, len(files))
	var workers sync.WaitGroup
	for range min(sumWorkers, runtime.GOMAXPROCS(0)) {
		workers.Go(func() {
			buf := make([]byte, readSize)
			for t := range tasks {
				f := files[t.file]
				from := int64(t.chunk) * chunk
				s, err := sumChunk(ctx, filepath.Join(dir, f.Name), from, min(chunk, f.Size-from), digest, buf)
				if err != nil {
					cancel(err)
				}
				sums[t.file][t.chunk] = s
			}
		})
	}
	for i, f := range files {
		sums[i] = make([]sum, chunks(f.Size, chunk))
	}
	for i := range files {
		for j := range sums[i] {
			tasks <- task{i, j}
		}
	}
	close(tasks)
	workers.Wait()
	return sums, context.Cause(ctx)
}

func sumChunk(ctx context.Context, path string, from, size int64, digest bool, buf []byte) (s sum, err error) {
	if err := context.Cause(ctx); err != nil {
		return sum{}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return sum{}, err
	}
	defer func() { _ = f.Close() }()
	var whole hash.Hash
	if digest {
		whole = sha256.New()
	}
	for done := int64(0); done < size; {
		n, err := f.ReadAt(buf[:min(int64(len(buf)), size-done)], from+done)
		if n == 0 && errors.Is(err, io.EOF) {
			return sum{}, fmt.Errorf("%s has %d bytes of %d: %w", filepath.Base(path), from+done, from+size, errs.ErrInvalid)
		} else if err != nil && !errors.Is(err, io.EOF) {
			return sum{}, err
		}
		s.crc = crc32.Update(s.crc, castagnoli, buf[:n])
		if whole != nil {
			_, _ = whole.Write(buf[:n])
		}
		done += int64(n)
	}
	if whole != nil {
		s.sha256 = whole.Sum(nil)
	}
	return s, nil
}

// Seal describes the written files, makes them durable and renames the directory.
func Seal(ctx context.Context, img *Image, part, dir string, digest bool) error {
	entries, err := os.ReadDir(part)
	if err != nil {
		return err
	}
	var infos []fs.FileInfo
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		img.Files, infos = append(img.Files, File{Name: e.Name(), Size: info.Size()}), append(infos, info)
	}
	img.ChunkSize = chunkSize
	failures := make([]error, len(img.Files))
	var syncing sync.WaitGroup
	for i, f := range img.Files { // disk work, concurrent with the checksums
		syncing.Go(func() { failures[i] = syncPath(filepath.Join(part, f.Name)) })
	}
	sums, err := sumFiles(ctx, part, img.Files, chunkSize, digest)
	syncing.Wait()
	if err := errors.Join(append(failures, err)...); err != nil {
		return err
	}
	for i := range img.Files {
		for _, s := range sums[i] {
			img.Files[i].CRC32C = append(img.Files[i].CRC32C, s.crc)
		}
		img.Files[i].setChecked(filepath.Join(part, img.Files[i].Name), infos[i])
	}
	if digest {
		img.Digest = img.digest(sums)
	}
	b, err := encodeManifest(*img)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(part, manifestName), b, 0o600); err != nil {
		return err
	}
	if err := errors.Join(syncPath(filepath.Join(part, manifestName)), syncPath(part)); err != nil {
		return err
	}
	return place(part, dir)
}
