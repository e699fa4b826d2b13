package builds

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const team = "team-a"

// hash returns one of a digit.
func hash(digit byte) string { return strings.Repeat(string(digit), 64) }

func open(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *Store) put(t *testing.T, namespace, hash, content string) {
	t.Helper()
	if err := s.PutFiles(t.Context(), namespace, hash, strings.NewReader(content)); err != nil {
		t.Fatalf("PutFiles: %v", err)
	}
}

func (s *Store) content(t *testing.T, namespace, hash string) string {
	t.Helper()
	f, err := s.Files(namespace, hash)
	if err != nil {
		t.Fatalf("Files: %v", err)
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// size is what the store counts.
func (s *Store) size() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// tree lists the files below a directory.
func tree(t *testing.T, dir string) (files []string) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return files
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	if s.HasFiles(team, hash('a')) {
		t.Error("a new store has files")
	}
	s.put(t, team, hash('a'), "one")
	s.put(t, team, hash('a'), "two")
	if got := s.content(t, team, hash('a')); got != "two" || s.size() != 3 {
		t.Errorf("the archive is %q, %d bytes are counted", got, s.size())
	}
	if _, err := s.Files("team-b", hash('a')); !errors.Is(err, errs.ErrNotFound) || s.HasFiles("team-b", hash('a')) {
		t.Errorf("another namespace sees the archive: %v", err)
	}
	again := open(t, Config{Dir: dir})
	if got := again.content(t, team, hash('a')); got != "two" || again.size() != 3 {
		t.Errorf("after a restart the archive is %q, %d bytes are counted", got, again.size())
	}
	if info, err := os.Stat(filepath.Join(dir, "files", team)); err != nil || info.Mode().Perm() != dirMode {
		t.Errorf("the directory: %v, %v", info.Mode(), err)
	}
	if err := os.Remove(again.path(archive{team, hash('a')})); err != nil {
		t.Fatal(err)
	}
	if again.HasFiles(team, hash('a')) || again.size() != 0 {
		t.Error("an archive that was removed by hand is still there")
	}
}

func TestBadNames(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	for _, a := range []archive{
		{team, ""},
		{team, strings.Repeat("A", 64)},
		{team, hash('a')[1:]},
		{team, hash('a') + "a"},
		{team, "../" + hash('a')[3:]},
		{team, hash('a')[:63] + "/"},
		{team, hash('a') + "\n"},
		{"..", hash('a')},
		{"", hash('a')},
		{"a/b", hash('a')},
		{"A", hash('a')},
	} {
		if err := s.PutFiles(t.Context(), a.namespace, a.hash, strings.NewReader("x")); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("PutFiles of %q: %v", a, err)
		}
		if _, err := s.Files(a.namespace, a.hash); err == nil || s.HasFiles(a.namespace, a.hash) {
			t.Errorf("there is %q: %v", a, err)
		}
	}
	for _, uid := range []types.UID{"", "..", "a/b", ".hidden", types.UID(strings.Repeat("a", 65)), "a\n"} {
		if err := s.RemoveLog(uid); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("RemoveLog of %q: %v", uid, err)
		}
		if err := s.Append(uid, Entry{}); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("Append to %q: %v", uid, err)
		}
	}
	if files := tree(t, dir); len(files) > 0 {
		t.Errorf("left are %v", files)
	}
}

// TestUploadsThatFail leave the earlier archive, and nothing else.
func TestUploadsThatFail(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir, MaxFiles: chunk + 10, MaxTotal: 2*chunk + 20})
	s.put(t, team, hash('a'), "before")
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, give := range map[string]struct {
		ctx  context.Context //nolint:containedctx // of a case
		r    io.Reader
		want error
	}{
		"larger than one chunk": {t.Context(), strings.NewReader(strings.Repeat("x", chunk+11)), errs.ErrTooLarge},
		"cut":                   {t.Context(), io.MultiReader(strings.NewReader("x"), iotest.ErrReader(io.ErrClosedPipe)), io.ErrClosedPipe},
		"cut short":             {t.Context(), io.MultiReader(strings.NewReader("x"), iotest.ErrReader(io.ErrUnexpectedEOF)), io.ErrUnexpectedEOF},
		"cancelled":             {cancelled, strings.NewReader(strings.Repeat("x", chunk+1)), context.Canceled},
	} {
		if err := s.PutFiles(give.ctx, team, hash('a'), give.r); !errors.Is(err, give.want) {
			t.Errorf("%s: %v, want %v", name, err, give.want)
		}
	}
	if got := s.content(t, team, hash('a')); got != "before" || s.size() != 6 {
		t.Errorf("the archive is %q, %d bytes are counted", got, s.size())
	}
	if files := tree(t, dir); len(files) != 1 {
		t.Errorf("left are %v", files)
	}
	s.put(t, team, hash('a'), strings.Repeat("x", chunk+10)) // exactly the most
}

func TestLeftoversAreRemoved(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	s.put(t, team, hash('a'), "whole")
	for _, name := range []string{partial + "123", hash('b')[1:], "stray"} {
		if err := os.WriteFile(filepath.Join(dir, "files", team, name), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "files", "stray"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "files", "empty"), 0o700); err != nil {
		t.Fatal(err)
	}
	if again := open(t, Config{Dir: dir}); again.size() != 5 {
		t.Errorf("%d bytes are counted, want 5", again.size())
	}
	if files := tree(t, dir); !slices.Equal(files, []string{"files/" + team + "/" + hash('a')}) {
		t.Errorf("left are %v", files)
	}
}

// wantKept fails unless a store has these archives and no other file.
func (s *Store) wantKept(t *testing.T, total int64, want ...archive) {
	t.Helper()
	files := tree(t, s.files)
	for _, a := range want {
		if !slices.Contains(files, a.namespace+"/"+a.hash) || !s.HasFiles(a.namespace, a.hash) {
			t.Errorf("%v is not kept", a)
		}
	}
	if len(files) != len(want) || s.size() != total {
		t.Errorf("left are %v, %d bytes are counted, want %d", files, s.size(), total)
	}
}

func TestEviction(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir, MaxTotal: 30})
	for i, digit := range []byte("abc") {
		s.put(t, team, hash(digit), strings.Repeat("x", 10))
		old := time.Now().Add(time.Duration(i-9) * time.Hour)
		if err := os.Chtimes(s.path(archive{team, hash(digit)}), old, old); err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, Config{Dir: dir, MaxTotal: 30}) // which reads the times of use
	reading, err := s.Files(team, hash('b'))
	if err != nil || !s.HasFiles(team, hash('a')) {
		t.Fatal(err)
	}
	defer func() { _ = reading.Close() }()
	s.put(t, "team-b", hash('d'), "y")
	s.wantKept(t, 21, archive{team, hash('a')}, archive{team, hash('b')}, archive{"team-b", hash('d')})
	s.put(t, team, hash('e'), strings.Repeat("x", 30))
	s.wantKept(t, 30, archive{team, hash('e')})
	if text, err := io.ReadAll(reading); err != nil || len(text) != 10 {
		t.Errorf("what was removed while it was read: %q, %v", text, err)
	}
	if err := s.PutFiles(t.Context(), team, hash('f'), strings.NewReader(strings.Repeat("x", 31))); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("more than all: %v", err)
	}
	s.wantKept(t, 0)
	s.put(t, team, hash('f'), "123456")
	open(t, Config{Dir: dir, MaxTotal: 5}).wantKept(t, 0)
}

// TestConcurrentPuts of one hash: each archive that is read is whole, and one file is left.
func TestConcurrentPuts(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			content := strings.Repeat(fmt.Sprint(i), 2*chunk)
			for range 5 {
				if err := s.PutFiles(t.Context(), team, hash('a'), strings.NewReader(content)); err != nil {
					t.Error(err)
				}
				f, err := s.Files(team, hash('a'))
				if err != nil {
					t.Error(err)
					return
				}
				text, err := io.ReadAll(f)
				if err = errors.Join(err, f.Close()); err != nil || len(text) != 2*chunk || bytes.Count(text, text[:1]) != len(text) {
					t.Errorf("%d bytes are mixed: %v", len(text), err)
				}
			}
		})
	}
	wg.Wait()
	if files := tree(t, dir); len(files) != 1 || s.size() != 2*chunk {
		t.Errorf("left are %v, %d bytes are counted", files, s.size())
	}
}

func (s *Store) messages(t *testing.T, build types.UID, offset, limit int) (texts []string) {
	t.Helper()
	entries, err := s.Entries(build, offset, limit)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		texts = append(texts, e.Message)
	}
	return texts
}

func TestLogs(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	const build = types.UID("5b0c7f5e-1111-2222-3333-444455556666")
	if got, err := s.Entries(build, 0, 10); err != nil || len(got) != 0 {
		t.Errorf("of none: %v, %v", got, err)
	}
	at := time.Now().UTC().Truncate(time.Microsecond)
	for i := range 7 {
		if err := s.Append(build, Entry{Timestamp: at, Level: LevelInfo, Message: fmt.Sprint(i), Step: "2"}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Entries(build, 0, 1)
	if want := (Entry{Timestamp: at, Level: LevelInfo, Message: "0", Step: "2"}); err != nil || len(got) != 1 || got[0] != want {
		t.Errorf("the first entry is %+v, %v; want %+v", got, err, want)
	}
	for _, ask := range [][2]int{{0, 100}, {1, 3}, {4, 1}, {5, 100}, {0, 2}, {6, 5}, {7, 1}, {100, 1}, {3, 100}} {
		var want []string
		for i := ask[0]; i < min(7, ask[0]+ask[1]); i++ {
			want = append(want, fmt.Sprint(i))
		}
		if got := s.messages(t, build, ask[0], ask[1]); !slices.Equal(got, want) {
			t.Errorf("from %d at most %d: %v, want %v", ask[0], ask[1], got, want)
		}
	}
	if all, err := s.Builds(); err != nil || !slices.Equal(all, []types.UID{build}) {
		t.Errorf("builds are %v, %v", all, err)
	}
	if err := errors.Join(s.RemoveLog(build), s.RemoveLog(build)); err != nil {
		t.Errorf("RemoveLog: %v", err)
	}
	if got := s.messages(t, build, 0, 1); len(got) > 0 {
		t.Errorf("a removed log has %v", got)
	}
}

// TestLogAfterCrash has an incomplete last line, as a crash leaves it: it is no entry, and the next one is whole.
func TestLogAfterCrash(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	if err := s.Append("b", Entry{Message: "one"}); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "logs", "b"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"message":"tw`); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Dir: dir})
	if got := s.messages(t, "b", 0, 9); !slices.Equal(got, []string{"one"}) {
		t.Errorf("entries are %v", got)
	}
	if err := s.Append("b", Entry{Message: "three"}); err != nil {
		t.Fatal(err)
	}
	if got := s.messages(t, "b", 1, 9); !slices.Equal(got, []string{"three"}) {
		t.Errorf("entries are %v", got)
	}
}

func TestLogIsBounded(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir, MaxLog: 1000})
	for i := range 100 {
		if err := s.Append("b", Entry{Level: LevelInfo, Message: fmt.Sprint("line ", i)}); err != nil {
			t.Fatal(err)
		}
		if i == 50 {
			s = open(t, Config{Dir: dir, MaxLog: 1000})
		}
	}
	got := s.messages(t, "b", 0, 1000)
	if n := len(got); n < 5 || n > 20 || got[n-1] != leftOut || slices.Index(got, leftOut) != n-1 {
		t.Errorf("entries are %q", got)
	}
	long := strings.Repeat("ü", maxMessage)
	s = open(t, Config{Dir: t.TempDir()})
	if err := s.Append("b", Entry{Message: long}); err != nil {
		t.Fatal(err)
	}
	if got := s.messages(t, "b", 0, 1); len(got) != 1 || len(got[0]) > maxMessage+10 || !strings.HasSuffix(got[0], "ü (cut)") {
		t.Errorf("a long message has %d bytes", len(got[0]))
	}
}

// TestConcurrentAppends are read meanwhile, in the order of the file.
func TestConcurrentAppends(t *testing.T) {
	s := open(t, Config{Dir: t.TempDir()})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				if err := s.Append("b", Entry{Message: "x"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	seen := 0
	for seen < 200 {
		seen += len(s.messages(t, "b", seen, 7))
	}
	wg.Wait()
	if n := len(s.messages(t, "b", 0, 1000)); n != 200 {
		t.Errorf("%d entries, want 200", n)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, cfg := range []Config{{}, {Dir: t.TempDir(), MaxFiles: -1}, {Dir: t.TempDir(), MaxLog: -1}} {
		if _, err := Open(cfg); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("Open(%+v): %v", cfg, err)
		}
	}
}
