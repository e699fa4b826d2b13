// Package logs keeps the latest lines of a sandbox's output in memory, and in files of bounded size. A
// writer never waits; a slow reader misses lines.
//
// Lock order: LineWriter.mu, then Buffer.mu.
package logs

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// keptBytes bounds the lines that a buffer keeps.
	keptBytes = 1 << 20
	// longestLine is where a line is cut in two.
	longestLine = 64 << 10
	// keptFile bounds each log file; its predecessor is kept too.
	keptFile = 16 << 20
)

// Buffer keeps the latest lines of output. A writer never waits; a slow reader
// misses lines.
type Buffer struct {
	mu    sync.Mutex
	lines []envd.LogLine // +checklocks:mu
	// the number of lines[0]
	first uint64 // +checklocks:mu
	size  int    // +checklocks:mu
	// closed and renewed at each line
	update chan struct{} // +checklocks:mu
}

// NewBuffer returns an empty buffer.
func NewBuffer() *Buffer { return &Buffer{update: make(chan struct{})} }

func (b *Buffer) add(l envd.LogLine) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, l)
	b.size += lineSize(l)
	drop := 0
	for b.size > keptBytes && drop < len(b.lines)-1 {
		b.size -= lineSize(b.lines[drop])
		drop++
	}
	b.lines = b.lines[drop:]
	b.first += uint64(drop)
	close(b.update)
	b.update = make(chan struct{})
}

// lineSize counts what a line costs, its fixed part too.
func lineSize(l envd.LogLine) int { return len(l.Line) + 80 }

// From returns the lines kept from number seq on, the number after them, and
// a channel that closes when there are more.
func (b *Buffer) From(seq uint64) ([]envd.LogLine, uint64, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.first + uint64(len(b.lines))
	seq = min(max(seq, b.first), next)
	return append([]envd.LogLine(nil), b.lines[seq-b.first:]...), next, b.update
}

// LineWriter splits output into lines for a buffer.
type LineWriter struct {
	Buffer *Buffer
	Source string
	Stream string

	mu   sync.Mutex
	rest []byte // +checklocks:mu
}

// Write never fails.
func (w *LineWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = append(w.rest, p...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		switch {
		case i >= 0 && i <= longestLine:
			w.emitLocked(w.rest[:i])
			w.rest = w.rest[i+1:]
		case len(w.rest) > longestLine:
			w.emitLocked(w.rest[:longestLine])
			w.rest = w.rest[longestLine:]
		default:
			w.rest = append([]byte(nil), w.rest...)
			return len(p), nil
		}
	}
}

// Flush emits a last line that does not end.
func (w *LineWriter) Flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.rest) > 0 {
		w.emitLocked(w.rest)
		w.rest = nil
	}
}

// +checklocks:w.mu
func (w *LineWriter) emitLocked(line []byte) {
	line = bytes.TrimSuffix(line, []byte("\r"))
	l := envd.LogLine{Timestamp: time.Now(), Source: w.Source, Stream: w.Stream, Line: string(bytes.ToValidUTF8(line, []byte("\uFFFD")))}
	if l.Source == envd.SourceAgent {
		l.Level = levelOf(l.Line)
	}
	w.Buffer.add(l)
}

// levelOf is the level of a line that slog.TextHandler wrote.
func levelOf(line string) string {
	_, rest, _ := strings.Cut(line, " "+slog.LevelKey+"=")
	level, _, _ := strings.Cut(rest, " ")
	return level
}

// File is a log file that is rotated by size.
type File struct {
	path string
	f    *os.File
	size int64
}

// OpenFile opens a file for appending, or creates it.
func OpenFile(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open log file: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("stat log file: %w", err)
	}
	return &File{path: path, f: f, size: st.Size()}, nil
}

// Close closes the file.
func (l *File) Close() error { return l.f.Close() }

// Write appends, and rotates a full file first.
func (l *File) Write(p []byte) (int, error) {
	if l.size+int64(len(p)) > keptFile && l.size > 0 {
		if err := l.rotate(); err != nil {
			return 0, err
		}
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	if err != nil {
		return n, fmt.Errorf("write log file: %w", err)
	}
	return n, nil
}

func (l *File) rotate() error {
	if err := os.Rename(l.path, l.path+".1"); err != nil {
		return fmt.Errorf("rotate log file: %w", err)
	}
	next, err := OpenFile(l.path)
	if err != nil {
		return err
	}
	_ = l.f.Close() // all was written
	*l = *next
	return nil
}
