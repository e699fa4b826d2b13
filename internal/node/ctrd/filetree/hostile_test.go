package filetree_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree/filetreetest"
)

// narrow makes nested directories with short names.
func narrow(t *testing.T, dir string, levels int) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(dir, strings.Repeat("d/", levels)), 0o700))
}

func TestHostileTrees(t *testing.T) {
	root(t)
	for name, c := range map[string]struct {
		tree    func(t *testing.T, dir string)
		refused string
	}{
		"4,000 levels of long names": {func(t *testing.T, dir string) { filetreetest.Deep(t, dir, 4000) }, "path"},
		"1,000 levels":               {func(t *testing.T, dir string) { narrow(t, dir, 1000) }, "directories above"},
		"200 levels":                 {func(t *testing.T, dir string) { narrow(t, dir, 200) }, ""},
		"a sparse file of 1 TiB": {func(t *testing.T, dir string) {
			must(t, os.WriteFile(filepath.Join(dir, "sparse"), nil, 0o600))
			must(t, os.Truncate(filepath.Join(dir, "sparse"), 1<<40))
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			src, dst := t.TempDir(), t.TempDir()
			c.tree(t, src)
			ways := map[string]func() error{
				"copy": func() error {
					tree := filetree.NewCopy(dst, src)
					return errors.Join(tree.PreCopy(t.Context()), tree.FinalCopy(t.Context()))
				},
			}
			if !strings.Contains(name, "sparse") { // a tar has the zeros
				ways["layer"] = func() error { return filetree.WriteLayer(t.Context(), io.Discard, src) }
				ways["tar"] = func() error { return filetree.WriteTree(t.Context(), io.Discard, src) }
			}
			for way, do := range ways {
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				err := do()
				runtime.ReadMemStats(&after)
				if (err != nil) != (c.refused != "") || err != nil && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), c.refused) || len(err.Error()) > 1000) {
					t.Errorf("%s: %.300v", way, err)
				}
				if n := after.TotalAlloc - before.TotalAlloc; n > 32<<20 {
					t.Errorf("%s allocated %d MiB", way, n>>20)
				}
			}
		})
	}
}
