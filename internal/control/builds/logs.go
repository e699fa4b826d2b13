package builds

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Levels of entries.
const (
	LevelDebug = "debug"
	LevelInfo  = "info"
	LevelWarn  = "warn"
	LevelError = "error"
)

const (
	// maxMessage bounds a message, in bytes; the rest is cut off.
	maxMessage = 16 << 10
	// leftOut is the message of the last entry of a log that has reached its limit.
	leftOut = "the log has reached its limit; the rest is left out"
	// lastLine is more than the length of that entry.
	lastLine = 512
)

// Entry is a message of a build.
type Entry struct {
	Timestamp time.Time `json:"timestamp"`
	// Level is one of the constants.
	Level   string `json:"level"`
	Message string `json:"message"`
	// Step is the number of the step that is done, from 1, or a name; empty for none.
	Step string `json:"step,omitempty"`
}

// uidForm is that of a UID, which names a file.
var uidForm = regexp.MustCompile(`^[0-9A-Za-z][-0-9A-Za-z]{0,63}$`)

func (s *Store) logOf(build types.UID) (path string, err error) {
	if !uidForm.MatchString(string(build)) {
		return "", fmt.Errorf("log of build %.80q: not a UID: %w", build, errs.ErrInvalid)
	}
	return filepath.Join(s.logs, string(build)), nil
}

// Append adds an entry to a log. Past the log's limit it is left out. It is not synced: a crash of the machine may lose
// the last ones.
func (s *Store) Append(build types.UID, e Entry) error {
	path, err := s.logOf(build)
	if err != nil {
		return err
	}
	e.Message = cut(e.Message)
	line, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("write log of build %s: %w", build, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.appendLocked(path, append(line, '\n'), e.Timestamp); err != nil {
		return fmt.Errorf("write log of build %s: %w", build, err)
	}
	return nil
}

// cut shortens a message, between characters.
func cut(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	end := maxMessage
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + " (cut)"
}

// appendLocked writes a line, after the end of one that a crash has cut.
// +checklocks:s.mu
func (s *Store) appendLocked(path string, line []byte, at time.Time) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, privateMode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	tail := make([]byte, min(info.Size(), lastLine))
	if _, err := f.ReadAt(tail, info.Size()-int64(len(tail))); err != nil {
		return err
	}
	last := bytes.TrimSuffix(tail, []byte("\n"))
	if isLeftOut(last[bytes.LastIndexByte(last, '\n')+1:]) {
		return nil
	}
	if info.Size()+int64(len(line)) > s.cfg.MaxLog {
		if line, err = json.Marshal(Entry{Timestamp: at, Level: LevelWarn, Message: leftOut}); err != nil {
			return err
		}
		line = append(line, '\n')
	}
	if len(last) == len(tail) && len(tail) > 0 {
		line = append([]byte("\n"), line...)
	}
	_, err = f.Write(line)
	return err
}

func isLeftOut(line []byte) bool {
	var e Entry
	return json.Unmarshal(line, &e) == nil && e.Level == LevelWarn && e.Message == leftOut
}

// Entries returns at most limit entries of a log, of which the first offset ones are left out. A build without a log has
// none.
func (s *Store) Entries(build types.UID, offset, limit int) (entries []Entry, err error) {
	path, err := s.logOf(build)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read log of build %s: %w", build, err)
	}
	defer func() { _ = f.Close() }()
	at := s.before(build, offset)
	if _, err = f.Seek(at.bytes, io.SeekStart); err == nil {
		entries, at, err = read(bufio.NewReader(f), at, offset, limit)
	}
	if err != nil {
		return nil, fmt.Errorf("read log of build %s: %w", build, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends[build] = at
	return entries, nil
}

// before returns a position that is not after an entry.
func (s *Store) before(build types.UID, entry int) position {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := s.ends[build]; at.entries <= entry {
		return at
	}
	return position{}
}

// read returns at most limit entries from offset on, and the position after the last one that it has read.
func read(lines *bufio.Reader, at position, offset, limit int) (entries []Entry, end position, err error) {
	for len(entries) < limit {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) { // an incomplete line is not an entry yet
			break
		}
		if err != nil {
			return nil, at, err
		}
		at.bytes += int64(len(line))
		var e Entry
		if json.Unmarshal(line, &e) != nil { // cut by a crash
			continue
		}
		if at.entries++; at.entries > offset {
			entries = append(entries, e)
		}
	}
	return entries, at, nil
}

// RemoveLog removes a build's log, if it has one.
func (s *Store) RemoveLog(build types.UID) error {
	path, err := s.logOf(build)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ends, build)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove log of build %s: %w", build, err)
	}
	return nil
}

// Builds returns the UIDs of the builds that have logs.
func (s *Store) Builds() ([]types.UID, error) {
	files, err := os.ReadDir(s.logs)
	if err != nil {
		return nil, fmt.Errorf("list logs of builds: %w", err)
	}
	var all []types.UID
	for _, f := range files {
		if uid := types.UID(f.Name()); !strings.HasPrefix(f.Name(), ".") {
			all = append(all, uid)
		}
	}
	return all, nil
}
