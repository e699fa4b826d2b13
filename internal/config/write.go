package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/config/setting"
)

// WriteYAML writes every setting as a file that Load reads, each with a comment
// with the source of its value.
func (r *Resolved) WriteYAML(w io.Writer) error {
	return writeYAML(w, r.table(), func(key string) string { return r.Source(key).String() })
}

func writeYAML(w io.Writer, settings []setting.Setting, comment func(key string) string) error {
	root := &yaml.Node{Kind: yaml.MappingNode}
	for _, s := range settings {
		key := &yaml.Node{Kind: yaml.ScalarNode, Value: s.Key}
		value := &yaml.Node{}
		if err := value.Encode(s.Value()); err != nil {
			return fmt.Errorf("encode %s: %w", s.Key, err)
		}
		if value.Kind == yaml.SequenceNode {
			value.Style = yaml.FlowStyle
		}
		if comment != nil {
			value.LineComment = comment(s.Key)
		}
		root.Content = append(root.Content, key, value)
	}
	enc := yaml.NewEncoder(w)
	if err := enc.Encode(root); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return enc.Close()
}

// MarshalJSON has every setting by its key, with value, source and, where there
// is one, the name of the source.
func (r *Resolved) MarshalJSON() ([]byte, error) {
	type entry struct {
		Value  any    `json:"value"`
		Source string `json:"source"`
		Name   string `json:"from,omitempty"`
	}
	out := map[string]entry{}
	for _, s := range r.table() {
		src := r.Source(s.Key)
		out[s.Key] = entry{s.Value(), src.Kind, src.Name}
	}
	return json.Marshal(out)
}

// savedFile keeps the settings of the last start, so that what it made can be
// found and removed without repeating its flags.
func savedFile(dataDir string) string { return filepath.Join(dataDir, "last-start.yaml") }

// Save keeps the settings in their data directory, for LoadSaved. Only the
// holder of the directory's lock may call it.
func Save(c Config) error {
	var b bytes.Buffer
	b.WriteString("# The settings of the last start, written by barchan; not read at the next start.\n")
	if err := writeYAML(&b, c.table(), nil); err != nil {
		return err
	}
	file := savedFile(c.DataDir)
	if err := durable.WriteFile(file, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("save configuration: %w", err)
	}
	return nil
}

// LoadSaved reads what Save kept, and false if there is nothing.
func LoadSaved(dataDir string) (Config, bool, error) {
	file := savedFile(dataDir)
	if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return Config{}, false, nil
	}
	r, err := Load(Options{File: file})
	if err != nil {
		return Config{}, false, fmt.Errorf("settings of the last start: %w", err)
	}
	return r.Config, true, nil
}

// Environment returns every setting as an environment variable, for a process that is to have the same.
func (c *Config) Environment() []string {
	var out []string
	for _, s := range c.table() {
		out = append(out, s.Env()+"="+s.Text())
	}
	return out
}
