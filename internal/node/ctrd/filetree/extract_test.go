package filetree_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/testkit/fuzztar"
)

// ways are the readers of tars.
var ways = map[string]func(ctx context.Context, dir string, r io.Reader) error{"tree": filetree.ReadTree, "layer": filetree.ApplyLayer}

func tarOf(t testing.TB, all ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range all {
		h.Mode = 0o700
		must(t, w.WriteHeader(&h))
		_, err := w.Write(make([]byte, h.Size))
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

func file(name string) tar.Header   { return tar.Header{Name: name, Typeflag: tar.TypeReg} }
func folder(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeDir} }

func nested(levels int) (all []tar.Header) {
	for n := 1; n <= levels; n++ {
		all = append(all, folder(strings.Repeat("d/", n)))
	}
	return all
}

// sparse is a tar of a few kilobytes with a file of 2 GiB that has a hole, as GNU tar writes it.
func sparse(t testing.TB) []byte {
	t.Helper()
	const size, block = 2 << 30, 512
	content := fmt.Sprintf("1\n%d\n1\n", size-1)
	content += strings.Repeat("\x00", block-len(content)) + "x"
	// The writer of archive/tar refuses these records; ones of the same length take their place.
	b := tarOf(t, tar.Header{Name: "sparse", Typeflag: tar.TypeReg, Size: int64(len(content)), PAXRecords: map[string]string{
		"GNU_sparse.major": "1", "GNU_sparse.minor": "0", "GNU_sparse.name": "sparse", "GNU_sparse.realsize": fmt.Sprint(size),
	}})
	b = bytes.ReplaceAll(b, []byte("GNU_sparse"), []byte("GNU.sparse"))
	at := len(b) - 2*block - 2*block // the content, before the two blocks at the end
	copy(b[at:], content)
	return b
}

func TestHostileTars(t *testing.T) {
	root(t)
	long := strings.Repeat("n", 255) + "/"
	for name, c := range map[string]struct {
		tar     []byte
		refused string // empty: not refused
	}{
		"a hole of 2 GiB":            {sparse(t), "sparse"},
		"1,000 levels":               {tarOf(t, nested(1000)...), "directories above"},
		"200 levels":                 {tarOf(t, nested(200)...), ""},
		"a path of 5 kB":             {tarOf(t, file(strings.Repeat(long, 20)+"f")), "path"},
		"a link of 5 kB":             {tarOf(t, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: strings.Repeat(long, 20)}), "path"},
		"a name of 300 bytes":        {tarOf(t, file(strings.Repeat("n", 300))), "too long"},
		"directories that are not":   {tarOf(t, file("a/b/c/f")), "no directory"},
		"out by dots":                {tarOf(t, file("../f")), "out of the tree"},
		"out by a link":              {tarOf(t, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}, file("l/f")), "directory above"},
		"deep by a link":             {tarOf(t, folder("a"), folder("a/b"), tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "a"}, file("l/b/f")), "link above"},
		"a hard link to the outside": {tarOf(t, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../../../../../../../etc/hostname"}), "h"},
		"a hard link to a directory": {tarOf(t, folder("d"), tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "d"}), "h"},
		"a file twice":               {tarOf(t, file("f"), file("f")), "twice"},
		"a file for a directory":     {tarOf(t, folder("d"), file("d/f"), file("d")), "twice"},
		"a directory twice":          {tarOf(t, folder("d"), file("d/f"), folder("d")), ""},
		"attributes of 100 kB": {tarOf(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, PAXRecords: map[string]string{
			"SCHILY.xattr.user.large": strings.Repeat("x", 100_000),
		}}), "attributes"},
	} {
		t.Run(name, func(t *testing.T) {
			for way, read := range ways {
				dir := t.TempDir()
				err := read(t.Context(), dir, bytes.NewReader(c.tar))
				if (err != nil) != (c.refused != "") || err != nil && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), c.refused) || len(err.Error()) > 1000) {
					t.Errorf("%s of %d bytes: %.300v", way, len(c.tar), err)
				}
				if n, err := durable.Usage(t.Context(), dir); err != nil || n > 64<<20 {
					t.Errorf("%s: %d bytes of disk, %v", way, n, err)
				}
			}
		})
	}
}

// What is kept of directories until the end takes bounded memory.
func TestTarOfLargeDirectories(t *testing.T) {
	root(t)
	in, out := io.Pipe()
	go func() {
		w := tar.NewWriter(out)
		for i := 0; ; i++ {
			h := folder(fmt.Sprint("d", i))
			h.PAXRecords = map[string]string{"comment": strings.Repeat("x", 60_000)}
			if w.WriteHeader(&h) != nil {
				return
			}
		}
	}()
	err := filetree.ReadTree(t.Context(), t.TempDir(), in)
	_ = in.Close()
	if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "too many entries") {
		t.Error(err)
	}
}

// Whatever a tar has, it is read within bounds and stays in its directory.
func FuzzTar(f *testing.F) {
	f.Add(sparse(f), "")
	f.Add(tarOf(f, file("f"), tar.Header{Name: "p", Typeflag: tar.TypeFifo}), "5 d \n0 d/f content\n1 d/h d/f\n0 d/.wh.f \n0 d/.wh..wh..opq ")
	f.Add([]byte{}, "2 l /dev/shm\n0 l/f x\n5 d \n2 d/l ..\n5 d/l/../../up \n1 h ../../../etc/hostname\n0 d/l/f x\n2 s s\n0 s/f x")
	d := fuzztar.NewDir(f)
	f.Fuzz(func(t *testing.T, raw []byte, entries string) {
		for _, b := range [][]byte{raw, fuzztar.Make(entries)} {
			for _, read := range ways {
				d.Read(t, func(dir string) { _ = read(t.Context(), dir, bytes.NewReader(b)) }, func(dir string) {
					if n, err := durable.Usage(t.Context(), dir); err != nil || n > int64(len(b))*16+1<<20 {
						t.Errorf("%d bytes became %d, %v", len(b), n, err)
					}
				})
			}
		}
	})
}
