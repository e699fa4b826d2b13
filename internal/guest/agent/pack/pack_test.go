package pack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// tree makes files: a content that begins with -> makes a link, a name that ends with / a directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		link, isLink := strings.CutPrefix(content, "->")
		switch {
		case isLink:
			err = os.Symlink(strings.ReplaceAll(link, "ROOT", dir), file)
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(file, 0o750)
		default:
			err = os.WriteFile(file, []byte(content), 0o640)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// packed returns the entries of an archive, by name and content, and the notes.
func packed(t *testing.T, dir string, req envd.PackRequest) (entries, notes string, err error) {
	t.Helper()
	for i, p := range req.Paths {
		req.Paths[i] = dir + p
	}
	if req.MaxBytes == 0 {
		req.MaxBytes = 1 << 20
	}
	if req.MaxFiles == 0 {
		req.MaxFiles = 100
	}
	text, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	var out, said bytes.Buffer
	if err := Run(&out, &said, string(text)); err != nil {
		return "", "", errors.New(strings.ReplaceAll(err.Error(), dir, ""))
	}
	zip, err := gzip.NewReader(&out)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return strings.Join(all, "|"), strings.ReplaceAll(said.String(), dir, ""), nil
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil || h.Uid != os.Getuid() || h.Uname != "" {
			t.Fatalf("%+v, %v", h, err)
		}
		all = append(all, strings.TrimSpace(fmt.Sprintf("%s %s%s", h.Name, content, strings.ReplaceAll(h.Linkname, dir, ""))))
	}
}

func TestPack(t *testing.T) {
	t.Parallel()
	dir := tree(t, map[string]string{
		"a/x": "X", "a/sub/y.o": "Y", "a/sub/z": "Z", "a/empty/": "", "b": "B", "to-a": "->a", "to-b": "->ROOT/b", "a/away": "->/etc/passwd", "a/[1]": "one", "zero": "->/dev/zero",
	})
	const all = "./|[1] one|away /etc/passwd|empty/|sub/|sub/y.o Y|sub/z Z|x X"
	tests := map[string]struct {
		give       envd.PackRequest
		want, fail string
	}{
		"a file":              {give: envd.PackRequest{Paths: []string{"/b"}}, want: "b B"},
		"a link to a file":    {give: envd.PackRequest{Paths: []string{"/to-b"}}, want: "to-b B"},
		"a directory":         {give: envd.PackRequest{Paths: []string{"/a/"}}, want: all},
		"a link to one":       {give: envd.PackRequest{Paths: []string{"/to-a"}}, want: all},
		"below a link":        {give: envd.PackRequest{Paths: []string{"/to-a/sub"}}, want: "./|y.o Y|z Z"},
		"several":             {give: envd.PackRequest{Paths: []string{"/b", "/a/sub"}}, want: "./|b B|y.o Y|z Z"},
		"wildcards":           {give: envd.PackRequest{Paths: []string{"/a/s*/[yz]*"}}, want: "./|y.o Y|z Z"},
		"excluded":            {give: envd.PackRequest{Paths: []string{"/a"}, Exclude: []string{"**/*.o", "empty", "[[]1]"}}, want: "./|away /etc/passwd|sub/|sub/z Z|x X"},
		"excluded but":        {give: envd.PackRequest{Paths: []string{"/a"}, Exclude: []string{"*", "!sub/z"}}, want: "./|sub/z Z"},
		"excluded file":       {give: envd.PackRequest{Paths: []string{"/b", "/a/x"}, Exclude: []string{"x"}}, want: "./|b B"},
		"parents":             {give: envd.PackRequest{Paths: []string{"/./a/sub/z", "/./a/x"}, Parents: true}, want: "./|a/|a/sub/|a/sub/z Z|a/x X"},
		"parents of a part":   {give: envd.PackRequest{Paths: []string{"/a/./sub", "/./b"}, Parents: true}, want: "./|sub/|sub/y.o Y|sub/z Z|b B"},
		"parents of wildcard": {give: envd.PackRequest{Paths: []string{"/a/./s*/z*"}, Parents: true}, want: "./|sub/|sub/z Z"},
		"none":                {give: envd.PackRequest{Paths: []string{"/none"}}, fail: `there is no "/none"`},
		"none by wildcard":    {give: envd.PackRequest{Paths: []string{"/none*"}}, fail: `no file matches ["/none*"]`},
		"a device":            {give: envd.PackRequest{Paths: []string{"/zero"}}, fail: `"/zero" is no file and no directory`},
		"too many":            {give: envd.PackRequest{Paths: []string{"/a"}, MaxFiles: 3}, fail: "there are more than 3 files"},
		"too large":           {give: envd.PackRequest{Paths: []string{"/a"}, MaxBytes: 4}, fail: "the files have more than 4 bytes"},
		"no pattern":          {give: envd.PackRequest{Paths: []string{"/a"}, Exclude: []string{"["}}, fail: "exclude: syntax error in pattern"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, _, err := packed(t, dir, tt.give)
			if got != tt.want || (err == nil) != (tt.fail == "") || (err != nil && err.Error() != tt.fail) {
				t.Errorf("%q, %v; want %q, %q", got, err, tt.want, tt.fail)
			}
		})
	}
}

// TestHostile packs what a stage may have made to do harm: sparse files, loops of links, devices, and deep directories.
func TestHostile(t *testing.T) {
	t.Parallel()
	dir := tree(t, map[string]string{"loop": "->loop", "d/loop": "->../d", "d/f": "f"})
	if err := errors.Join(syscall.Mkfifo(filepath.Join(dir, "d/pipe"), 0o600), os.WriteFile(filepath.Join(dir, "sparse"), nil, 0o600), os.Truncate(filepath.Join(dir, "sparse"), 1<<40)); err != nil {
		t.Fatal(err)
	}
	if got, notes, err := packed(t, dir, envd.PackRequest{Paths: []string{"/d"}}); err != nil || got != "./|f f|loop ../d" || notes != "\"/d/pipe\" is a socket, a FIFO or a device, and is left out\n" {
		t.Errorf("%q, %q, %v", got, notes, err)
	}
	if _, _, err := packed(t, dir, envd.PackRequest{Paths: []string{"/sparse"}}); err == nil || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Errorf("a sparse file: %v", err)
	}
	if _, _, err := packed(t, dir, envd.PackRequest{Paths: []string{"/loop"}}); err == nil {
		t.Error("a loop of links is followed")
	}
	deep := filepath.Join(dir, "deep", strings.Repeat("d/", 400))
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, _, err := packed(t, dir, envd.PackRequest{Paths: []string{"/deep"}, MaxFiles: 1000}); err != nil {
		t.Errorf("deep directories: %v", err)
	}
}
