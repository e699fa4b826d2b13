package auditlog

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"
)

// maxLine bounds a line of the file, in bytes.
const maxLine = 1 << 20

// poll is how often a reader that follows looks for more.
const poll = 250 * time.Millisecond

// Filter selects entries. The zero value selects all.
type Filter struct {
	// Since is the earliest time.
	Since time.Time
	// Sandbox is the ID of one that is acted on, or made.
	Sandbox string
}

func (f *Filter) selects(e *Entry) bool {
	return !e.Time.Before(f.Since) && (f.Sandbox == "" || e.Sandbox == f.Sandbox || slices.Contains(e.Made, f.Sandbox))
}

// Read calls each with the entries of a log, the oldest first, until it fails. With follow it then waits for more, until ctx is
// done. Lines that a crash left unfinished are skipped. A log that does not exist is an fs.ErrNotExist.
func Read(ctx context.Context, path string, filter Filter, follow bool, each func(Entry) error) error {
	files, err := openAll(path)
	if err != nil {
		return err
	}
	defer func() { closeAll(files) }()
	for _, f := range files[:len(files)-1] {
		if err := readLines(bufio.NewReader(f), filter, each); err != nil {
			return err
		}
	}
	last := files[len(files)-1]
	r := bufio.NewReaderSize(last, maxLine)
	for {
		if err := readLines(r, filter, each); err != nil || !follow {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(poll):
		}
		next, err := rotated(path, last)
		if err != nil {
			return err
		}
		if next == nil {
			continue
		}
		if err := readLines(r, filter, each); err != nil { // what came before the rename
			_ = next.Close()
			return err
		}
		files, last = append(files, next), next
		r.Reset(next)
	}
}

// openAll opens the files, the oldest first. They are open before any is read, so that a rotation skips none.
func openAll(path string) (files []*os.File, err error) {
	for i := 0; ; i++ {
		f, err := os.Open(numbered(path, i))
		if errors.Is(err, fs.ErrNotExist) && i > 0 {
			break
		}
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("read the audit log: %w", err)
		}
		files = append(files, f)
	}
	slices.Reverse(files)
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// rotated opens the file at path if it is no longer the one that is read.
func rotated(path string, last *os.File) (*os.File, error) {
	now, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // it is between two files
	}
	if err != nil {
		return nil, err
	}
	was, err := last.Stat()
	if err != nil || os.SameFile(now, was) {
		return nil, err
	}
	return os.Open(path)
}

// readLines reads whole lines up to the end. A line without its end is left unread if the reader can hold it.
func readLines(r *bufio.Reader, filter Filter, each func(Entry) error) error {
	for {
		line, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			return nil // what is unfinished is skipped; the log ends it before it writes more
		case err != nil:
			return fmt.Errorf("read the audit log: %w", err)
		}
		var e Entry
		if json.Unmarshal(line, &e) != nil || !filter.selects(&e) {
			continue
		}
		if err := each(e); err != nil {
			return err
		}
	}
}
