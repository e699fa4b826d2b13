// Package auditlog writes who did what to which sandbox, one JSON object a line, to a file that rotates, and reads it again.
//
// It decides nothing about what is recorded, and an [Entry] has no field for secrets, contents or messages of errors. Writing
// never blocks a request: entries that the disk does not take in time are lost, counted and reported in the server's log.
//
// It holds no locks.
package auditlog

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Who acts, in Entry.By.
const (
	ByKey     = "key"     // an API key; Name is that of its object
	ByToken   = "token"   // a token of the cluster
	ByUser    = "user"    // a user of the Kubernetes API; Name is the user's
	ByAdmin   = "admin"   // the admin socket
	BySandbox = "sandbox" // the holder of a sandbox's token or of a signed URL
	BySSH     = "ssh"     // the holder of an SSH key or password; Name is the method and the key's fingerprint
)

// Entry is one action.
type Entry struct {
	Time time.Time `json:"time"`
	By   string    `json:"by"`
	Name string    `json:"name,omitempty"`
	// Namespace of the object that is acted on.
	Namespace string `json:"namespace,omitempty"`
	// Action is a verb and a noun, such as "delete sandboxes".
	Action string `json:"action"`
	// Request is the method and the route or path, without a query.
	Request string `json:"request,omitempty"`
	// Object is the name of what is acted on, where that is no sandbox.
	Object  string `json:"object,omitempty"`
	Sandbox string `json:"sandbox,omitempty"`
	// Made has the IDs of sandboxes that the action made.
	Made []string `json:"made,omitempty"`
	// Address is the client's, without a port; empty for a local socket.
	Address string `json:"address,omitempty"`
	// Status of HTTP; 0 where there is none.
	Status int `json:"status,omitempty"`
	// Result is ok, refused (the client's fault) or failed. Add sets it from Status.
	Result string `json:"result"`
}

const (
	// waiting is how many entries may wait for the disk.
	waiting = 4096
	// complainEvery is the least time between two reports of losses.
	complainEvery = time.Minute
	// maxText is the length of a text, in bytes; what follows is cut. Clients choose names, also of what does not exist.
	maxText = 512
	// Defaults of Config.
	defaultSize  = 100 << 20
	defaultFiles = 10
)

// Config configures a log.
type Config struct {
	// Path of the file; Path.1 and so on are the older ones. Required.
	Path string
	// MaxSize of one file in bytes. Default 100 MiB.
	MaxSize int64
	// MaxFiles is how many files there are, this one included. Default 10.
	MaxFiles int
	// Log is required; Metrics may be nil.
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Log takes entries. A nil Log records nothing. It is safe for concurrent use.
type Log struct {
	cfg     Config
	entries chan Entry
	lost    prometheus.Counter

	// of Run alone
	file       *os.File
	size       int64
	complained time.Time
}

// Open opens the file, and makes it and its directory if they are missing.
func Open(cfg Config) (*Log, error) {
	if !filepath.IsAbs(cfg.Path) || cfg.Log == nil || cfg.MaxSize < 0 || cfg.MaxFiles < 0 {
		return nil, fmt.Errorf("audit log %q: want an absolute path, a log and positive limits: %w", cfg.Path, errs.ErrInvalid)
	}
	cfg.MaxSize, cfg.MaxFiles = cmp.Or(cfg.MaxSize, defaultSize), cmp.Or(cfg.MaxFiles, defaultFiles)
	l := &Log{
		cfg: cfg, entries: make(chan Entry, waiting),
		lost: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "barchan", Subsystem: "audit", Name: "lost_total", Help: "Entries that are missing in the audit log because its disk was full, too slow or failed."}),
	}
	if err := telemetry.Register(cfg.Metrics, l.lost); err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(cfg.Path), 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the audit log: %w", err)
	}
	return l, l.open()
}

// Add records an entry. It does not wait for the disk.
func (l *Log) Add(e Entry) {
	if l == nil {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	if e.Result == "" {
		e.Result = resultOf(e.Status)
	}
	for _, text := range []*string{&e.By, &e.Name, &e.Namespace, &e.Action, &e.Request, &e.Object, &e.Sandbox, &e.Address, &e.Result} {
		if len(*text) > maxText {
			*text = strings.ToValidUTF8((*text)[:maxText]+"…", "")
		}
	}
	select {
	case l.entries <- e:
	default:
		l.lost.Inc()
	}
}

func resultOf(status int) string {
	switch {
	case status >= 500:
		return "failed"
	case status >= 400:
		return "refused"
	default:
		return "ok"
	}
}

// Run writes entries until ctx is done, then those that wait, and closes the file.
func (l *Log) Run(ctx context.Context) error {
	defer func() {
		if l.file != nil {
			_ = l.file.Close()
		}
	}()
	for {
		select {
		case e := <-l.entries:
			l.write(ctx, e)
		case <-ctx.Done():
			for {
				select {
				case e := <-l.entries:
					l.write(ctx, e)
				default:
					return nil
				}
			}
		}
	}
}

func (l *Log) write(ctx context.Context, e Entry) {
	if err := l.append(e); err != nil {
		l.lost.Inc()
		if now := time.Now(); now.Sub(l.complained) > complainEvery {
			l.complained = now
			l.cfg.Log.ErrorContext(ctx, "audit entries lost", telemetry.Path, l.cfg.Path, telemetry.Error, err)
		}
	}
}

func (l *Log) append(e Entry) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	if l.file != nil && l.size > 0 && l.size+int64(len(line)) > l.cfg.MaxSize {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	if l.file == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	n, err := l.file.Write(line)
	l.size += int64(n)
	if err == nil {
		return nil
	}
	// The next open ends a line of which a part was written.
	_ = l.file.Close()
	l.file = nil
	return err
}

// open opens the file, and ends a line that a crash left unfinished.
func (l *Log) open() error {
	f, err := os.OpenFile(l.cfg.Path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the audit log: %w", err)
	}
	end, err := f.Seek(0, 2)
	if err == nil && end > 0 {
		var last [1]byte
		if _, err = f.ReadAt(last[:], end-1); err == nil && last[0] != '\n' {
			_, err = f.WriteString("\n")
			end++
		}
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open the audit log: %w", err)
	}
	l.file, l.size = f, end
	return nil
}

// rotate renames each file to the next number, the last one over the oldest, and begins a new one.
func (l *Log) rotate() error {
	_ = l.file.Close()
	l.file = nil
	for i := l.cfg.MaxFiles - 1; i >= 1; i-- {
		if err := os.Rename(numbered(l.cfg.Path, i-1), numbered(l.cfg.Path, i)); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("rotate the audit log: %w", err)
		}
	}
	if l.cfg.MaxFiles == 1 {
		if err := os.Remove(l.cfg.Path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("rotate the audit log: %w", err)
		}
	}
	return l.open()
}

// numbered returns the path of a file; 0 is the one that is written.
func numbered(path string, i int) string {
	if i == 0 {
		return path
	}
	return path + "." + strconv.Itoa(i)
}
