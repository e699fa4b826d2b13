package logs

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestBuffer(t *testing.T) {
	b := NewBuffer()
	w := &LineWriter{Buffer: b, Source: "s", Stream: "o"}
	write := func(s string) {
		if _, err := io.WriteString(w, s); err != nil {
			t.Fatal(err)
		}
	}
	write("one\ntw")
	write("o\r\n\nbad \xff byte\n" + strings.Repeat("x", longestLine+5))
	w.Flush()
	lines, next, _ := b.From(0)
	got := make([]string, len(lines))
	for i, l := range lines {
		got[i] = l.Line
	}
	want := []string{"one", "two", "", "bad \uFFFD byte", strings.Repeat("x", longestLine), "xxxxx"}
	if !reflect.DeepEqual(got, want) || next != 6 {
		t.Errorf("%d lines, next %d", len(got), next)
	}
	_, _, update := b.From(next)
	for i := range 40_000 {
		write(fmt.Sprintf("%040d\n", i))
	}
	<-update
	lines, next, _ = b.From(6)
	if next != 40_006 || len(lines) > keptBytes/80 || lines[len(lines)-1].Line != fmt.Sprintf("%040d", 39_999) {
		t.Errorf("%d lines kept, next %d", len(lines), next)
	}
	if rest, _, _ := b.From(next + 100); len(rest) != 0 {
		t.Errorf("%d lines from beyond the end", len(rest))
	}
}

func TestFileIsRotated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := OpenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, keptFile/4)
	for range 6 {
		if _, err := l.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]int64{path: keptFile / 2, path + ".1": keptFile} {
		if st, err := os.Stat(file); err != nil || st.Size() != want {
			t.Errorf("%s: %v %v", file, st, err)
		}
	}
}
