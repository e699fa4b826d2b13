package agent_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func stat(t *testing.T, c *envd.Client, path string) *filesystempb.EntryInfo {
	t.Helper()
	res, err := c.Filesystem().Stat(t.Context(), connect.NewRequest(&filesystempb.StatRequest{Path: path}))
	noError(t, err)
	return res.Msg.GetEntry()
}

func TestStat(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	writeFile(t, a.dir+"/f", "12345")
	e := stat(t, c, a.dir+"/f")
	if e.GetName() != "f" || e.GetPath() != a.dir+"/f" || e.GetType() != filesystempb.FileType_FILE_TYPE_FILE || e.GetSize() != 5 ||
		e.GetMode() != 0o644 || e.GetPermissions() != "-rw-r--r--" {
		t.Errorf("file: %v", e)
	}
	if e.GetOwner() == "" || e.GetGroup() == "" || e.GetModifiedTime().AsTime().IsZero() || e.SymlinkTarget != nil {
		t.Errorf("file: %v", e)
	}
	if e := stat(t, c, a.dir); e.GetType() != filesystempb.FileType_FILE_TYPE_DIRECTORY || e.GetPermissions() != "drwxr-xr-x" {
		t.Errorf("directory: %v", e)
	}
	_, err := c.Filesystem().Stat(t.Context(), connect.NewRequest(&filesystempb.StatRequest{Path: a.dir + "/none"}))
	wantCode(t, err, connect.CodeNotFound, "no such file")
	_, err = a.client("ghost").Filesystem().Stat(t.Context(), connect.NewRequest(&filesystempb.StatRequest{Path: "/"}))
	wantCode(t, err, connect.CodeUnauthenticated, "invalid username: 'ghost'")
}

func TestStatLinks(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	writeFile(t, a.dir+"/f", "12345")
	links(t, a.dir, map[string]string{"/rel": "f", "/chain": "rel", "/broken": "nothing", "/dirlink": ".", "/loop": "loop"})
	noError(t, os.Chmod(a.dir+"/f", 0o640))
	noError(t, os.Chmod(a.dir, 0o750))
	listed := map[string]*filesystempb.EntryInfo{}
	res, err := c.Filesystem().ListDir(t.Context(), connect.NewRequest(&filesystempb.ListDirRequest{Path: a.dir}))
	noError(t, err)
	for _, e := range res.Msg.GetEntries() {
		listed["/"+e.GetName()] = e
	}
	for link, want := range map[string]struct {
		target string
		kind   filesystempb.FileType
		mode   uint32
	}{
		"/rel":     {"/f", filesystempb.FileType_FILE_TYPE_FILE, 0o640},
		"/chain":   {"/f", filesystempb.FileType_FILE_TYPE_FILE, 0o640},
		"/broken":  {"/nothing", filesystempb.FileType_FILE_TYPE_SYMLINK, 0o777},
		"/loop":    {"/loop", filesystempb.FileType_FILE_TYPE_SYMLINK, 0o777},
		"/dirlink": {"", filesystempb.FileType_FILE_TYPE_DIRECTORY, 0o750},
	} {
		for _, e := range []*filesystempb.EntryInfo{stat(t, c, a.dir+link), listed[link]} {
			if e.GetType() != want.kind || e.GetMode() != want.mode || e.GetSymlinkTarget() != a.dir+want.target || e.GetPermissions() != "Lrwxrwxrwx" {
				t.Errorf("%s: %v", link, e)
			}
		}
	}
}

func TestMakeMoveRemove(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{})
	fs := a.client("nobody").Filesystem()
	mkdir := func(path string) error {
		_, err := fs.MakeDir(t.Context(), connect.NewRequest(&filesystempb.MakeDirRequest{Path: path}))
		return err
	}
	move := func(from, to string) error {
		_, err := fs.Move(t.Context(), connect.NewRequest(&filesystempb.MoveRequest{Source: from, Destination: to}))
		return err
	}
	remove := func(path string) error {
		_, err := fs.Remove(t.Context(), connect.NewRequest(&filesystempb.RemoveRequest{Path: path}))
		return err
	}
	noError(t, mkdir(a.dir+"/x/y/z"))
	if e := stat(t, a.client("root"), a.dir+"/x/y"); e.GetOwner() != "nobody" || e.GetMode() != 0o755 {
		t.Errorf("made: %v", e)
	}
	wantCode(t, mkdir(a.dir+"/x/y/z"), connect.CodeAlreadyExists, "directory already exists: "+a.dir+"/x/y/z")
	writeFile(t, a.dir+"/x/f", "content")
	wantCode(t, mkdir(a.dir+"/x/f"), connect.CodeInvalidArgument, "not a directory")
	wantCode(t, mkdir(a.dir+"/x/f/g"), connect.CodeInvalidArgument, "not a directory")
	if err := move(a.dir+"/x/f", a.dir+"/n/e/w"); err != nil || readFile(t, a.dir+"/n/e/w") != "content" {
		t.Errorf("move: %v", err)
	}
	if e := stat(t, a.client("root"), a.dir+"/n/e"); e.GetOwner() != "nobody" {
		t.Errorf("made by move: %v", e)
	}
	wantCode(t, move(a.dir+"/x/f", a.dir+"/q/r"), connect.CodeNotFound, "")
	if _, err := os.Stat(a.dir + "/q"); !os.IsNotExist(err) {
		t.Error("a move of nothing made directories")
	}
	wantCode(t, move(a.dir+"/x", a.dir+"/x/y/inside"), connect.CodeInvalidArgument, "")
	for range 2 { // a missing one is no error
		if err := remove(a.dir + "/x"); err != nil {
			t.Error(err)
		}
	}
	wantCode(t, remove("/"), connect.CodeInvalidArgument, "/")
}

func TestListDir(t *testing.T) {
	a := start(t, envd.Config{})
	for _, d := range []string{"/d/a/b/c", "/d/e"} {
		noError(t, os.MkdirAll(a.dir+d, 0o755))
	}
	writeFile(t, a.dir+"/d/a/f", "")
	noError(t, os.Symlink("../e", a.dir+"/d/a/link"))
	noError(t, os.Symlink("d", a.dir+"/alias"))
	noError(t, os.Symlink("loop", a.dir+"/loop"))
	fs := a.client("root").Filesystem()
	list := func(path string, depth uint32) ([]string, error) {
		res, err := fs.ListDir(t.Context(), connect.NewRequest(&filesystempb.ListDirRequest{Path: path, Depth: depth}))
		if err != nil {
			return nil, err
		}
		var got []string
		for _, e := range res.Msg.GetEntries() {
			got = append(got, strings.TrimPrefix(e.GetPath(), a.dir))
		}
		return got, nil
	}
	for name, tc := range map[string]struct {
		path  string
		depth uint32
		want  string
	}{
		"default":      {"/d", 0, "/d/a /d/e"},
		"one":          {"/d", 1, "/d/a /d/e"},
		"two":          {"/d", 2, "/d/a /d/a/b /d/a/f /d/a/link /d/e"},
		"all":          {"/d", 4_000_000_000, "/d/a /d/a/b /d/a/b/c /d/a/f /d/a/link /d/e"},
		"by a link":    {"/alias", 2, "/alias/a /alias/a/b /alias/a/f /alias/a/link /alias/e"},
		"uncleaned":    {"/d/../d/", 1, "/d/a /d/e"},
		"link in link": {"/alias/a/link", 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := list(a.dir+tc.path, tc.depth)
			if err != nil || strings.Join(got, " ") != tc.want {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
	_, err := list(a.dir+"/none", 1)
	wantCode(t, err, connect.CodeNotFound, "")
	_, err = list(a.dir+"/d/a/f", 1)
	wantCode(t, err, connect.CodeInvalidArgument, "path is not a directory")
	_, err = list(a.dir+"/loop", 1)
	wantCode(t, err, connect.CodeFailedPrecondition, "")
}

// watched collects the events of a WatchDir stream until want are all there.
func watched(t *testing.T, c *envd.Client, req *filesystempb.WatchDirRequest, act func(), want ...string) []*filesystempb.FilesystemEvent {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.Filesystem().WatchDir(ctx, connect.NewRequest(req))
	noError(t, err)
	defer func() { _ = s.Close() }()
	if !s.Receive() || s.Msg().GetStart() == nil {
		t.Fatalf("first event %v, error %v", s.Msg(), s.Err())
	}
	act()
	var events []*filesystempb.FilesystemEvent
	for len(missing(events, want)) > 0 && s.Receive() {
		if ev := s.Msg().GetFilesystem(); ev != nil {
			events = append(events, ev)
		}
	}
	if err := s.Err(); err != nil {
		t.Fatalf("%v; missing %v of %v", err, missing(events, want), texts(events))
	}
	return events
}

func texts(events []*filesystempb.FilesystemEvent) []string {
	var got []string
	for _, ev := range events {
		got = append(got, strings.ToLower(strings.TrimPrefix(ev.GetType().String(), "EVENT_TYPE_"))+" "+ev.GetName())
	}
	return got
}

func missing(events []*filesystempb.FilesystemEvent, want []string) []string {
	got := texts(events)
	return slices.DeleteFunc(slices.Clone(want), func(w string) bool { return slices.Contains(got, w) })
}

func TestWatchDir(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	upload := func(path, content string) {
		_, err := c.Upload(t.Context(), path, strings.NewReader(content), nil)
		must(err)
	}
	must(os.Mkdir(a.dir+"/w", 0o755))
	dir := a.dir + "/w"
	events := watched(t, c, &filesystempb.WatchDirRequest{Path: dir, IncludeEntry: true}, func() {
		upload(dir+"/up", "1")
		upload(dir+"/up", "22")
		writeFile(t, dir+"/f", "x")
		must(os.Chmod(dir+"/f", 0o600))
		must(os.Rename(dir+"/f", dir+"/g"))
		must(os.Mkdir(dir+"/d", 0o755))
		writeFile(t, dir+"/d/unseen", "x")
		must(os.Remove(dir + "/g"))
	}, "create up", "write up", "create f", "write f", "chmod f", "rename f", "create g", "create d", "remove g")
	got := texts(events)
	if slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "unseen") || strings.Contains(s, "barchan") }) {
		t.Errorf("too much: %v", got)
	}
	if n := len(slices.DeleteFunc(slices.Clone(got), func(s string) bool { return s != "create up" })); n != 1 {
		t.Errorf("a replaced file was created %d times: %v", n, got)
	}
	for _, ev := range events {
		gone := ev.GetType() == filesystempb.EventType_EVENT_TYPE_REMOVE || ev.GetType() == filesystempb.EventType_EVENT_TYPE_RENAME
		if gone && ev.GetEntry() != nil || ev.GetName() == "d" && ev.GetEntry().GetType() != filesystempb.FileType_FILE_TYPE_DIRECTORY {
			t.Errorf("entry: %v", ev)
		}
	}
}

func TestWatchDirRecursive(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	must(os.MkdirAll(a.dir+"/w/old/deep", 0o755))
	dir := a.dir + "/w"
	events := watched(t, c, &filesystempb.WatchDirRequest{Path: dir, Recursive: true}, func() {
		writeFile(t, dir+"/old/deep/f", "x")
		// All at once, before they can be watched.
		must(os.MkdirAll(dir+"/new/a/b", 0o755))
		writeFile(t, dir+"/new/a/b/f", "x")
		// A tree that is moved in is watched, one moved away no more.
		must(os.MkdirAll(a.dir+"/outside/sub", 0o755))
		writeFile(t, a.dir+"/outside/sub/f", "x")
		must(os.Rename(a.dir+"/outside", dir+"/inside"))
		must(os.Rename(dir+"/old", dir+"/moved"))
	}, "create old/deep/f", "create new", "create new/a", "create new/a/b", "create new/a/b/f",
		"create inside", "create inside/sub", "create inside/sub/f", "rename old", "create moved", "create moved/deep/f")
	seen := map[string]int{}
	for _, text := range texts(events) {
		seen[text]++
		if strings.HasPrefix(text, "create") && seen[text] > 1 {
			t.Errorf("%s: reported %d times", text, seen[text])
		}
	}
	events = watched(t, c, &filesystempb.WatchDirRequest{Path: dir, Recursive: true}, func() {
		must(os.Rename(dir+"/moved", dir+"/again"))
		eventuallyWrites(t, c, dir)
	}, "create again", "create again/deep/g")
	for _, text := range texts(events) {
		if strings.Contains(text, "moved/deep/g") {
			t.Errorf("event under an old name: %v", texts(events))
		}
	}
}

// eventuallyWrites writes after the watch has seen the move before it.
func eventuallyWrites(t *testing.T, c *envd.Client, dir string) {
	t.Helper()
	if r := run(t, c, sh("sleep 0.3; echo > "+dir+"/again/deep/g")); r.end.GetExitCode() != 0 {
		t.Error(r.stderr)
	}
}

func TestWatchErrors(t *testing.T) {
	a := start(t, envd.Config{})
	fs := a.client("root").Filesystem()
	writeFile(t, a.dir+"/f", "")
	for path, code := range map[string]connect.Code{a.dir + "/none": connect.CodeNotFound, a.dir + "/f": connect.CodeInvalidArgument} {
		_, err := fs.CreateWatcher(t.Context(), connect.NewRequest(&filesystempb.CreateWatcherRequest{Path: path}))
		wantCode(t, err, code, path)
		s, err := fs.WatchDir(t.Context(), connect.NewRequest(&filesystempb.WatchDirRequest{Path: path}))
		noError(t, err)
		if s.Receive() {
			t.Errorf("watching %s: %v", path, s.Msg())
		}
		wantCode(t, s.Err(), code, path)
		_ = s.Close() // the error was judged
	}
	_, err := fs.GetWatcherEvents(t.Context(), connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: "w1"}))
	wantCode(t, err, connect.CodeNotFound, "watcher with id w1 not found")
	_, err = fs.RemoveWatcher(t.Context(), connect.NewRequest(&filesystempb.RemoveWatcherRequest{WatcherId: "w1"}))
	wantCode(t, err, connect.CodeNotFound, "watcher with id w1 not found")
	ctx, cancel := context.WithTimeout(t.Context(), 1e8)
	defer cancel()
	s, err := fs.WatchDir(ctx, connect.NewRequest(&filesystempb.WatchDirRequest{Path: a.dir}))
	if err == nil { // its time may be over before it has begun
		defer func() { _ = s.Close() }()
		for s.Receive() {
		}
		err = s.Err()
	}
	wantCode(t, err, connect.CodeDeadlineExceeded, "")
}

func TestWatchers(t *testing.T) {
	a := start(t, envd.Config{})
	fs := a.client("root").Filesystem()
	res, err := fs.CreateWatcher(t.Context(), connect.NewRequest(&filesystempb.CreateWatcherRequest{Path: a.dir, Recursive: true, IncludeEntry: true}))
	noError(t, err)
	id := res.Msg.GetWatcherId()
	noError(t, os.Mkdir(a.dir+"/d", 0o755))
	writeFile(t, a.dir+"/d/f", "x")
	var events []*filesystempb.FilesystemEvent
	eventually.True(t, "events", func() bool {
		res, err := fs.GetWatcherEvents(t.Context(), connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id}))
		noError(t, err)
		events = append(events, res.Msg.GetEvents()...)
		return len(missing(events, []string{"create d", "create d/f"})) == 0
	})
	if e := events[0].GetEntry(); e.GetPath() != a.dir+"/d" {
		t.Errorf("entry %v", e)
	}
	for i := range 50 { // a call has what happened before it
		path := fmt.Sprintf("%s/%d", a.dir, i)
		writeFile(t, path, "x")
		noError(t, os.Chmod(path, 0o600))
		noError(t, os.Remove(path))
		res, err := fs.GetWatcherEvents(t.Context(), connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id}))
		noError(t, err)
		if lost := missing(res.Msg.GetEvents(), []string{fmt.Sprintf("create %d", i), fmt.Sprintf("write %d", i), fmt.Sprintf("chmod %d", i), fmt.Sprintf("remove %d", i)}); len(lost) > 0 {
			t.Fatalf("call %d lacks %v: %v", i, lost, res.Msg.GetEvents())
		}
	}
	_, err = fs.RemoveWatcher(t.Context(), connect.NewRequest(&filesystempb.RemoveWatcherRequest{WatcherId: id}))
	noError(t, err)
	_, err = fs.GetWatcherEvents(t.Context(), connect.NewRequest(&filesystempb.GetWatcherEventsRequest{WatcherId: id}))
	wantCode(t, err, connect.CodeNotFound, "not found")
	// A watcher that is never removed does not block the agent's end.
	_, err = fs.CreateWatcher(t.Context(), connect.NewRequest(&filesystempb.CreateWatcherRequest{Path: a.dir}))
	noError(t, err)
}
