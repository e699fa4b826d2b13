package agent

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func testAccounts(t *testing.T, passwd, group string) accounts {
	t.Helper()
	dir := t.TempDir()
	a := accounts{filepath.Join(dir, "passwd"), filepath.Join(dir, "group")}
	for file, text := range map[string]string{a.passwd: passwd, a.group: group} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

func TestAccounts(t *testing.T) {
	a := testAccounts(t, "root:x:0:0:root:/root:/bin/sh\n# x:1\nbroken\nnan:x:a:b::/\nann:x:1000:1001:Ann:/home/ann:/bin/bash\nbare:x:7:8::\nann:x:5:5:second:/:\n",
		"root:x:0:\nann:x:1001:\ndocker:x:20:bob,ann\nsudo:x:27:ann\nprefix:x:30:anna\n")
	ann := account{name: "ann", uid: 1000, gid: 1001, home: "/home/ann", groups: []uint32{1001, 20, 27}}
	for spec, want := range map[string]account{
		"ann": ann, "1000": ann,
		"root":      {name: "root", home: "/root", groups: []uint32{0}},
		"bare":      {name: "bare", uid: 7, gid: 8, home: "/", groups: []uint32{8}},
		"4242":      {name: "4242", uid: 4242, home: "/"},
		"4242:4343": {name: "4242", uid: 4242, gid: 4343, home: "/"},
		"ann:sudo":  {name: "ann", uid: 1000, gid: 27, home: "/home/ann"},
	} {
		got, err := a.resolve(spec)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", spec, got, err, want)
		}
	}
	for _, spec := range []string{"", "ghost", "nan", "ann:ghosts", "-1", "4294967296", "broken"} {
		if got, err := a.resolve(spec); err == nil {
			t.Errorf("%q is %+v", spec, got)
		}
	}
	if o, g := a.names().owner(1000, 27); o != "ann" || g != "sudo" {
		t.Errorf("owner %s:%s", o, g)
	}
	if o, g := a.names().owner(99, 98); o != "99" || g != "98" {
		t.Errorf("owner %s:%s", o, g)
	}
}

func TestAccountsOfAnImageWithoutUsers(t *testing.T) {
	none := accounts{filepath.Join(t.TempDir(), "passwd"), filepath.Join(t.TempDir(), "group")}
	for name, give := range map[string]struct {
		cfg  envd.Config
		want account
	}{
		"nobody named":       {envd.Config{}, account{name: "root", home: "/", groups: []uint32{0}}},
		"the program's user": {envd.Config{User: "12:34"}, account{name: "12", uid: 12, gid: 34, home: "/"}},
		"a user of its own":  {envd.Config{User: "12:34", DefaultUser: "56"}, account{name: "56", uid: 56, home: "/"}},
	} {
		u := users{none, newSettings(&give.cfg, none)}
		if got, err := u.named(""); err != nil || !reflect.DeepEqual(got, give.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, give.want)
		}
		if got, err := u.named("root"); err != nil || got.uid != 0 {
			t.Errorf("%s: root is %+v, %v", name, got, err)
		}
		if got, err := u.named("78:90"); err != nil || got.uid != 78 || got.gid != 90 {
			t.Errorf("%s: a number is %+v, %v", name, got, err)
		}
		if got, err := u.named("nonesuch"); err == nil {
			t.Errorf("%s: an unknown name is %+v", name, got)
		}
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/sh\n", "root:x:0:ann\n", "root:0")
	f.Fuzz(func(t *testing.T, passwd, group, spec string) {
		a := testAccounts(t, passwd, group)
		if acc, err := a.resolve(spec); err == nil && acc.home == "" {
			t.Errorf("%+v has no home", acc)
		}
	})
}

func TestResolvePath(t *testing.T) {
	acc := account{name: "ann", home: "/home/ann"}
	for path, want := range map[string]string{
		"/a/b": "/a/b", "a": "/home/ann/a", "~": "/home/ann", "~/x": "/home/ann/x", "": "/work", ".": "/home/ann",
		"../bob": "/home/bob", "/a/../../b": "/b", "a/./b//c/": "/home/ann/a/b/c", "a~": "/home/ann/a~",
	} {
		if got, err := resolvePath(path, acc, "/work"); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", path, got, err, want)
		}
	}
	if got, err := resolvePath("", acc, ""); err != nil || got != "/home/ann" {
		t.Errorf("no directory at all: %q %v", got, err)
	}
	for _, path := range []string{"~bob", "~bob/x", "/a\x00b"} {
		if got, err := resolvePath(path, acc, ""); err == nil {
			t.Errorf("%q is %q", path, got)
		}
	}
}

func FuzzResolvePath(f *testing.F) {
	f.Add("../../~/x", "/home/ann", "/work")
	f.Fuzz(func(t *testing.T, path, home, workdir string) {
		got, err := resolvePath(path, account{home: home}, workdir)
		if err == nil && (!filepath.IsAbs(got) || filepath.Clean(got) != got) {
			t.Errorf("%q, home %q, workdir %q: %q", path, home, workdir, got)
		}
	})
}

func FuzzWantsGzip(f *testing.F) {
	for _, s := range []string{"gzip, deflate, br", "gzip;q=0.5,identity;q=0", "*;q=0", ";;,,q="} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		zip, err := wantsGzip(http.Header{"Accept-Encoding": {header}})
		if zip && (err != nil || !strings.Contains(strings.ToLower(header), "gzip") && !strings.Contains(header, "*")) {
			t.Errorf("%q: gzip, %v", header, err)
		}
	})
}

func FuzzKeepaliveAndTimeout(f *testing.F) {
	f.Add("50", "60000")
	f.Add("-1", "9999999999")
	f.Fuzz(func(t *testing.T, keepalive, timeout string) {
		if d := keepaliveOf(http.Header{envd.HeaderKeepalive: {keepalive}}); d <= 0 {
			t.Errorf("keepalive %q: %v", keepalive, d)
		}
		if d, err := timeoutOf(http.Header{envd.HeaderConnectMillis: {timeout}}); err == nil && d < 0 {
			t.Errorf("timeout %q: %v", timeout, d)
		}
	})
}

func TestLogbook(t *testing.T) {
	b := newLogbook()
	w := &lineWriter{book: b, source: "s", stream: "o"}
	write := func(s string) {
		if _, err := io.WriteString(w, s); err != nil {
			t.Fatal(err)
		}
	}
	write("one\ntw")
	write("o\r\n\nbad \xff byte\n" + strings.Repeat("x", longestLine+5))
	w.flush()
	lines, next, _ := b.from(0)
	got := make([]string, len(lines))
	for i, l := range lines {
		got[i] = l.Line
	}
	want := []string{"one", "two", "", "bad \uFFFD byte", strings.Repeat("x", longestLine), "xxxxx"}
	if !reflect.DeepEqual(got, want) || next != 6 {
		t.Errorf("%d lines, next %d", len(got), next)
	}
	_, _, update := b.from(next)
	for i := range 40_000 {
		write(fmt.Sprintf("%040d\n", i))
	}
	<-update
	lines, next, _ = b.from(6)
	if next != 40_006 || len(lines) > keptBytes/80 || lines[len(lines)-1].Line != fmt.Sprintf("%040d", 39_999) {
		t.Errorf("%d lines kept, next %d", len(lines), next)
	}
	if rest, _, _ := b.from(next + 100); len(rest) != 0 {
		t.Errorf("%d lines from beyond the end", len(rest))
	}
}

func TestLogFileIsSetAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := openLogFile(path)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, keptFile/4)
	for range 6 {
		if _, err := l.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.f.Close(); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]int64{path: keptFile / 2, path + ".1": keptFile} {
		if st, err := os.Stat(file); err != nil || st.Size() != want {
			t.Errorf("%s: %v %v", file, st, err)
		}
	}
}

func TestCheckBundle(t *testing.T) {
	good := "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	for text, ok := range map[string]bool{"": true, good: true, good + good: true, "x": false, good + "x": false, strings.ReplaceAll(good, "CERTIFICATE", "PRIVATE KEY"): false} {
		if err := checkBundle(text); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The kernel's note of what a listing has shown may be read late; that of another file at the same
// path is news.
func TestListedOnce(t *testing.T) {
	dir := t.TempDir()
	w := &watch{listed: map[string]listing{}}
	list := func(name string, ago time.Duration) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		w.listed[path] = listing{time.Now().Add(-ago), file}
		return path
	}
	late, gone, replaced := list("late", doubleWithin/2), list("gone", 0), list("replaced", 0)
	if err := errors.Join(os.Remove(gone), os.Rename(list("other", 0), replaced)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{late: true, gone: true, replaced: false, list("old", 2*doubleWithin): false, dir: false} {
		if got := w.wasListed(path); got != want {
			t.Errorf("%s: told already: %v", path, got)
		}
	}
	if w.wasListed(late) {
		t.Error("two notes are taken for one")
	}
}

// A file may be uploaded and replaced before a watch reads the first of the kernel's notes.
func TestWatchTellsEachUpload(t *testing.T) {
	up, path := newUploads(), "/d/f"
	up.remember(path, false)
	up.remember(path, true)
	failed := up.remember(path, true)
	up.forget(path, failed)
	w := &watch{uploads: up, told: map[string]placed{}}
	for i, want := range []bool{false, true, true} { // the last note is of somebody else's rename
		if got, ok := w.nextUpload(path); !ok || got.replaced != want {
			t.Errorf("note %d: %+v, %v, want replaced %v", i, got, ok, want)
		}
	}
	if got, ok := w.nextUpload("/d/other"); ok {
		t.Errorf("never uploaded, yet %+v", got)
	}
}

// What an ending agent was asked for too late would have nobody who ends it.
func TestNothingBeginsAtTheEnd(t *testing.T) {
	ws := newWatchers()
	ws.closeAll()
	w, err := newWatch(t.TempDir(), false, false, accounts{}, newUploads())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ws.add(w); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("a watcher: %v", err)
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
	r := newReaper()
	defer signal.Stop(r.sigs)
	r.close()
	if _, _, err := r.start("/bin/true", []string{"true"}, &syscall.ProcAttr{}); connect.CodeOf(startError(err)) != connect.CodeUnavailable {
		t.Errorf("a program: %v", err)
	}
}
