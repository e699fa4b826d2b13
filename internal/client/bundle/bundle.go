// Package bundle makes support bundles: archives that describe a server and its machine for a bug report.
//
// A bundle has no secrets. Objects, events and settings enter it by lists of allowed fields; free text, such as the log, is
// redacted. The package changes nothing but the archive's own file.
package bundle

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/dynamic"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

const (
	// partTimeout bounds the collection of one part, because a server may hang.
	partTimeout = 20 * time.Second
	// maxPart bounds one part, in bytes; what is beyond it is cut off.
	maxPart = 16 << 20
)

// Config has the sources of a bundle. All of it is needed but for Journal.
type Config struct {
	// Settings are those of the command; the settings of the last start are read from the data directory.
	Settings *config.Resolved
	// Version describes this program, and is encoded as JSON.
	Version any
	// Admin reaches the server, which may be down.
	Admin *adminclient.Client
	// Doctor checks the machine, with or without a server.
	Doctor func(ctx context.Context) []adminclient.Check
	// Kube returns a client of the server's Kubernetes API.
	Kube func(ctx context.Context) (dynamic.Interface, error)
	// Events returns the newest lifecycle events.
	Events func(ctx context.Context) ([]client.SandboxEvent, error)
	// Journal reads the journal of a machine without a running server; nil: it is left out.
	Journal func() ([]adminclient.JournalRow, error)
}

// Manifest describes a bundle; the archive's manifest.json has it.
type Manifest struct {
	CreatedAt time.Time `json:"createdAt"`
	// Server is the server's state: "ready", its boot phase, or why it was not read.
	Server string `json:"server"`
	Parts  []Part `json:"parts"`
	// Removed are the kinds of values that the bundle does not have.
	Removed []string `json:"removed"`
}

// Part is one file of a bundle.
type Part struct {
	Name string `json:"name"`
	// Bytes is the size of the file in the archive.
	Bytes int `json:"bytes"`
	// Note is a limit of the part, such as that its end alone is there.
	Note string `json:"note,omitempty"`
	// Error is why the part is missing or incomplete.
	Error string `json:"error,omitempty"`
}

// Failed counts the parts that are missing or incomplete.
func (m *Manifest) Failed() (n int) {
	for i := range m.Parts {
		if m.Parts[i].Error != "" {
			n++
		}
	}
	return n
}

// removed are the kinds of values that no part has.
func removed() []string {
	return []string{
		"Secrets, ConfigMaps and API keys, as whole objects",
		"environments, commands, arguments, labels, annotations and metadata of sandboxes and of all other objects",
		"messages of conditions and events, and data of events; their types and reasons are there",
		"sources of volumes, webhooks, egress rules and registry credentials",
		"settings that may have credentials or personal data: only whether they are set",
		"from the log and other text: access log, keys, tokens, passwords, private keys, paths and queries of URLs",
	}
}

// Bundle is a collected bundle in memory.
type Bundle struct {
	Manifest Manifest
	files    []file
}

type file struct {
	name    string
	content []byte
}

// source collects one part. text is free text of programs, which is redacted by patterns. online means that a server is needed.
type source struct {
	name         string
	text, online bool
	collect      func(ctx context.Context) (content any, note string, err error)
}

// Collect reads all parts. A part that fails becomes an entry of the manifest; the only error is that of ctx.
func Collect(ctx context.Context, cfg Config) (*Bundle, error) {
	c := &collector{Config: cfg, redactor: newRedactor(cfg.Settings)}
	up := c.readStatus(ctx)
	b := &Bundle{Manifest: Manifest{CreatedAt: time.Now().UTC(), Server: c.redactor.text(c.server), Removed: removed()}}
	for _, s := range c.sources() {
		if s.online && !up {
			continue
		}
		p, content := c.part(ctx, &s)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("collect %s: %w", s.name, err)
		}
		b.Manifest.Parts = append(b.Manifest.Parts, p)
		if content != nil {
			b.files = append(b.files, file{s.name, content})
		}
	}
	manifest, err := encode(&b.Manifest)
	if err != nil {
		return nil, err
	}
	b.files = append([]file{{"manifest.json", manifest}}, b.files...)
	return b, nil
}

// part collects one part and removes secrets from it.
func (c *collector) part(ctx context.Context, s *source) (Part, []byte) {
	ctx, cancel := context.WithTimeout(ctx, partTimeout)
	defer cancel()
	p := Part{Name: s.name}
	value, note, err := s.collect(ctx)
	content, encodeErr := c.content(value, s.text)
	err = errors.Join(err, encodeErr)
	if err != nil {
		p.Error = c.redactor.text(errs.Text(err))
	}
	if len(content) > maxPart {
		content, note = content[:maxPart], fmt.Sprintf("cut off after %d bytes", maxPart)
	}
	p.Bytes, p.Note = len(content), note
	return p, content
}

// content returns a value as a file without secrets: bytes as they are, all else as JSON. Nil has no file.
func (c *collector) content(value any, text bool) ([]byte, error) {
	content, raw := value.([]byte)
	switch {
	case value == nil:
		return nil, nil
	case raw && text:
		return []byte(c.redactor.text(string(content))), nil
	case raw:
		return c.redactor.known(content), nil
	}
	encoded, err := encode(value)
	if err != nil || !text {
		return c.redactor.known(encoded), err
	}
	var tree any
	if err := json.Unmarshal(encoded, &tree); err != nil {
		return nil, fmt.Errorf("decode part: %w", err)
	}
	return encode(c.redactor.tree(tree))
}

func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode part: %w", err)
	}
	return b.Bytes(), nil
}
