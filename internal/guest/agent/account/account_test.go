package account

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func testAccounts(t *testing.T, dir, passwd, group string) Database {
	t.Helper()
	a := Database{filepath.Join(dir, "passwd"), filepath.Join(dir, "group")}
	for file, text := range map[string]string{a.Passwd: passwd, a.Group: group} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

func TestAccounts(t *testing.T) {
	a := testAccounts(t, t.TempDir(), "root:x:0:0:root:/root:/bin/sh\n# x:1\nbroken\nnan:x:a:b::/\nann:x:1000:1001:Ann:/home/ann:/bin/bash\nbare:x:7:8::\nann:x:5:5:second:/:\n",
		"root:x:0:\nann:x:1001:\ndocker:x:20:bob,ann\nsudo:x:27:ann\nprefix:x:30:anna\n")
	ann := User{Name: "ann", UID: 1000, GID: 1001, Home: "/home/ann", Groups: []uint32{1001, 20, 27}}
	for spec, want := range map[string]User{
		"ann": ann, "1000": ann,
		"root":      {Name: "root", Home: "/root", Groups: []uint32{0}},
		"bare":      {Name: "bare", UID: 7, GID: 8, Home: "/", Groups: []uint32{8}},
		"4242":      {Name: "4242", UID: 4242, Home: "/"},
		"4242:4343": {Name: "4242", UID: 4242, GID: 4343, Home: "/"},
		"ann:sudo":  {Name: "ann", UID: 1000, GID: 27, Home: "/home/ann"},
	} {
		got, err := a.Resolve(spec)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", spec, got, err, want)
		}
	}
	for _, spec := range []string{"", "ghost", "nan", "ann:ghosts", "-1", "4294967296", "broken"} {
		if got, err := a.Resolve(spec); err == nil {
			t.Errorf("%q is %+v", spec, got)
		}
	}
	if o, g := a.Names().Owner(1000, 27); o != "ann" || g != "sudo" {
		t.Errorf("owner %s:%s", o, g)
	}
	if o, g := a.Names().Owner(99, 98); o != "99" || g != "98" {
		t.Errorf("owner %s:%s", o, g)
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/sh\n", "root:x:0:ann\n", "root:0")
	dir, err := os.MkdirTemp("/dev/shm", "fuzz-") // in memory, for millions of inputs
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = os.RemoveAll(dir) })
	f.Fuzz(func(t *testing.T, passwd, group, spec string) {
		a := testAccounts(t, dir, passwd, group)
		if acc, err := a.Resolve(spec); err == nil && acc.Home == "" {
			t.Errorf("%+v has no home", acc)
		}
	})
}

func TestResolvePath(t *testing.T) {
	acc := User{Name: "ann", Home: "/home/ann"}
	for path, want := range map[string]string{
		"/a/b": "/a/b", "a": "/home/ann/a", "~": "/home/ann", "~/x": "/home/ann/x", "": "/work", ".": "/home/ann",
		"../bob": "/home/bob", "/a/../../b": "/b", "a/./b//c/": "/home/ann/a/b/c", "a~": "/home/ann/a~",
	} {
		if got, err := ResolvePath(path, acc, "/work"); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", path, got, err, want)
		}
	}
	if got, err := ResolvePath("", acc, ""); err != nil || got != "/home/ann" {
		t.Errorf("no directory at all: %q %v", got, err)
	}
	for _, path := range []string{"~bob", "~bob/x", "/a\x00b"} {
		if got, err := ResolvePath(path, acc, ""); err == nil {
			t.Errorf("%q is %q", path, got)
		}
	}
}

func FuzzResolvePath(f *testing.F) {
	f.Add("../../~/x", "/home/ann", "/work")
	f.Fuzz(func(t *testing.T, path, home, workdir string) {
		got, err := ResolvePath(path, User{Home: home}, workdir)
		if err == nil && (!filepath.IsAbs(got) || filepath.Clean(got) != got) {
			t.Errorf("%q, home %q, workdir %q: %q", path, home, workdir, got)
		}
	})
}
