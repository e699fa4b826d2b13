package bundle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

// logTail is how many bytes of the end of the server's log a bundle has.
const logTail = 2 << 20

// collector reads the parts of one bundle.
type collector struct {
	Config
	redactor *redactor
	status   adminclient.Status
	server   string
	diag     adminclient.Diagnostics
	diagErr  error
}

// readStatus reports whether a server answers, and keeps its status and its inside.
func (c *collector) readStatus(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	var err error
	if c.status, err = c.Admin.Status(ctx); err != nil {
		c.server = errs.Text(err)
		return false
	}
	if c.server = "ready"; !c.status.Ready {
		c.server = "booting: " + c.status.Phase
	}
	c.diag, c.diagErr = c.Admin.Diagnostics(ctx)
	return true
}

// sources lists the parts in their order.
func (c *collector) sources() []source {
	list := []source{
		{name: "version.json", collect: func(context.Context) (any, string, error) { return c.Version, "", nil }},
		{name: "machine.json", collect: func(context.Context) (any, string, error) { return machineFacts(&c.Settings.Config) }},
		{name: "settings.json", collect: func(context.Context) (any, string, error) {
			return settingsOf(&c.Settings.Config, c.Settings.Source), "", nil
		}},
		{name: "settings-last-start.json", collect: c.lastStart},
		{name: "doctor.json", text: true, collect: func(ctx context.Context) (any, string, error) { return c.Doctor(ctx), "", nil }},
		{name: "status.json", text: true, online: true, collect: func(context.Context) (any, string, error) { return c.status, "", nil }},
		{name: "metrics.txt", text: true, online: true, collect: c.metrics},
		{name: "goroutines.txt", online: true, collect: func(context.Context) (any, string, error) {
			return []byte(c.diag.Goroutines), "", c.diagErr
		}},
		{name: "journal.json", collect: c.journal},
		{name: "log.txt", text: true, collect: c.log},
		{name: "lifecycle-events.json", online: true, collect: c.lifecycleEvents},
	}
	for _, k := range kinds() {
		list = append(list, source{name: "objects/" + k.resource.Resource + ".json", online: true, collect: func(ctx context.Context) (any, string, error) {
			client, err := c.Kube(ctx)
			if err != nil {
				return nil, "", err
			}
			return k.list(ctx, client)
		}})
	}
	return list
}

// lastStart returns the settings that the server was started with, which may differ from the command's.
func (c *collector) lastStart(context.Context) (any, string, error) {
	cfg, ok, err := config.LoadSaved(c.Settings.DataDir)
	switch {
	case err != nil:
		return nil, "", err
	case !ok:
		return nil, "no server was started on " + c.Settings.DataDir, nil
	}
	return settingsOf(&cfg, nil), "", nil
}

// metrics reads the metrics of the running server, at the address that it was started with.
func (c *collector) metrics(ctx context.Context) (any, string, error) {
	cfg, ok, err := config.LoadSaved(c.Settings.DataDir)
	if err != nil || !ok {
		cfg = c.Settings.Config
	}
	addr := cfg.MetricsAddr
	if addr == "" && cfg.Role == config.RoleNode {
		addr = cfg.HTTPAddr
	}
	if addr == "" {
		return nil, "metricsAddr is empty", nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+loopback(addr)+"/metrics", http.NoBody)
	if err != nil {
		return nil, "", fmt.Errorf("metricsAddr: %w", err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, "", fmt.Errorf("read metrics: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return nil, "", fmt.Errorf("read metrics: %s", res.Status)
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxPart+1))
	return text, "", err
}

// loopback returns a listening address as one to connect to.
func loopback(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err == nil && (host == "" || ip != nil && ip.IsUnspecified()) {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return addr
}

// journal returns the stages of sandboxes, of the server or of the database that no server uses.
func (c *collector) journal(context.Context) (any, string, error) {
	rows, err := c.diag.Journal, c.diagErr
	if c.status.PID == 0 {
		if c.Journal == nil {
			return nil, "no server runs", nil
		}
		rows, err = c.Journal()
	}
	if rows == nil && err == nil {
		return nil, "there is no journal here, or the server boots", nil
	}
	if err != nil {
		return nil, "", err
	}
	return rows, "", nil
}

// log returns the end of the server's log. A server in the foreground, or under systemd, has no file.
func (c *collector) log(context.Context) (_ any, note string, err error) {
	name := c.Settings.LogFile()
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "there is no " + name + "; where systemd runs the server, add the output of `journalctl -u barchan`, after a look for secrets", nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("read log: %w", err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, "", fmt.Errorf("read log: %w", err)
	}
	start := max(0, info.Size()-logTail)
	content, err := io.ReadAll(io.NewSectionReader(f, start, logTail))
	if err != nil {
		return nil, "", fmt.Errorf("read log: %w", err)
	}
	text := string(content)
	if start > 0 {
		_, text, _ = strings.Cut(text, "\n") // the first line is not whole
		note = fmt.Sprintf("the last %d bytes", len(text))
	}
	rest, lines := withoutAccess(text)
	if lines > 0 {
		note = strings.TrimPrefix(note+fmt.Sprintf(", without %d lines of the access log", lines), ", ")
	}
	return []byte(rest), note, nil
}

// lifecycleEvent is an event of a sandbox without its data.
type lifecycleEvent struct {
	Time      time.Time `json:"time"`
	Type      string    `json:"type"`
	Sandbox   string    `json:"sandbox"`
	Template  string    `json:"template"`
	Execution string    `json:"execution,omitempty"`
}

func (c *collector) lifecycleEvents(ctx context.Context) (any, string, error) {
	list, err := c.Events(ctx)
	out := make([]lifecycleEvent, 0, len(list))
	for i := range list {
		e := &list[i]
		out = append(out, lifecycleEvent{e.Timestamp, e.Type, e.SandboxID, e.TemplateID, e.ExecutionID})
	}
	return out, fmt.Sprintf("the newest %d of the key's namespace", len(out)), err
}

// directories returns the directories of a server whose disks matter.
func directories(cfg *config.Config) []string {
	return []string{"/", cfg.DataDir, cfg.RunDir, cfg.CacheDir, filepath.Join(cfg.DataDir, "node"), filepath.Join(cfg.DataDir, "containerd", "root")}
}
