package config

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/config/setting"
)

// DefaultFile is read if it exists and no other file is named.
const DefaultFile = "/etc/barchan/config.yaml"

// Defaults of a node, which serves its metrics and readiness at an address of its own.
const (
	nodeHTTPAddr = "127.0.0.1:7701"
	nodeSocket   = "/run/barchan/node.sock"
)

// EnvFile names the environment variable that names the file.
const EnvFile = "BARCHAN_CONFIG"

// Kinds of Source, in rising precedence.
const (
	FromDefault = "default"
	FromFile    = "file"
	FromEnv     = "env"
	FromFlag    = "flag"
)

// Source is where a value came from.
type Source struct {
	Kind string
	// Name is the file and line, the variable, or the flag with its dashes; of
	// a default it is empty.
	Name string
}

// String is the source in a few words.
func (s Source) String() string {
	if s.Name == "" {
		return s.Kind
	}
	return s.Name
}

// Options are the sources that Load reads.
type Options struct {
	// File is the YAML file; empty means $BARCHAN_CONFIG, then DefaultFile if it exists.
	File string
	// LookupEnv is os.LookupEnv, or nil to ignore the environment.
	LookupEnv func(string) (string, bool)
	// Flags were parsed already; the first set that has a key given decides.
	Flags []*setting.Flags
}

// Resolved is a Config with the sources of its values.
type Resolved struct {
	Config
	// File that was read; empty if none.
	File    string
	sources map[string]Source
}

// Source is where the value of a key came from.
func (r *Resolved) Source(key string) Source {
	if s, ok := r.sources[key]; ok {
		return s
	}
	return Source{Kind: FromDefault}
}

// Load reads all sources, derives what is left, and validates the whole. Its
// errors name the key, and are errs.ErrInvalid where the user must change something.
func Load(o Options) (*Resolved, error) {
	r := &Resolved{Config: Default(), sources: map[string]Source{}}
	settings := r.table()
	if o.LookupEnv == nil {
		o.LookupEnv = func(string) (string, bool) { return "", false }
	}
	if err := r.readFile(o, settings); err != nil {
		return nil, err
	}
	for _, s := range settings {
		text, ok := o.LookupEnv(s.Env())
		if !ok {
			continue
		}
		if err := s.Set(text); err != nil {
			return nil, fmt.Errorf("%s: %w", s.Env(), err)
		}
		r.sources[s.Key] = Source{FromEnv, s.Env()}
	}
	for _, s := range settings {
		text, ok := lookupFlag(o.Flags, s.Key)
		if !ok {
			continue
		}
		if err := s.Set(text); err != nil {
			return nil, fmt.Errorf("--%s: %w", s.Flag(), err)
		}
		r.sources[s.Key] = Source{FromFlag, "--" + s.Flag()}
	}
	if r.Role == RoleNode { // other defaults are its server's
		if r.Source("httpAddr").Kind == FromDefault {
			r.HTTPAddr = nodeHTTPAddr
		}
		if r.Source("metricsAddr").Kind == FromDefault {
			r.MetricsAddr = "" // httpAddr has all
		}
		r.NodeSocket = cmp.Or(r.NodeSocket, nodeSocket)
	}
	if err := r.complete(); err != nil {
		return nil, err
	}
	if err := r.Validate(); err != nil {
		return nil, r.blame(err)
	}
	return r, nil
}

// blame adds to a refused value where it was set.
func (r *Resolved) blame(err error) error {
	var bad *setting.Error
	if !errors.As(err, &bad) {
		return err
	}
	if src := r.Source(bad.Key); src.Kind != FromDefault {
		return fmt.Errorf("%w (set by %s)", err, src)
	}
	return err
}

func (r *Resolved) readFile(o Options, settings []setting.Setting) error {
	name, named := o.File, o.File != ""
	if !named {
		if name, named = o.LookupEnv(EnvFile); !named || name == "" {
			name, named = DefaultFile, false
		}
	}
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) && !named {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read configuration: %w: %w", err, errs.ErrInvalid)
	}
	defer func() { _ = f.Close() }()
	if err := r.decode(f, name, settings); err != nil {
		return err
	}
	r.File = name
	return nil
}

// decode walks the document itself, so that every refusal has its line.
func (r *Resolved) decode(in io.Reader, file string, settings []setting.Setting) error {
	var doc yaml.Node
	err := yaml.NewDecoder(io.LimitReader(in, 1<<20)).Decode(&doc)
	if errors.Is(err, io.EOF) {
		return nil // empty, or comments only
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %w", file, err, errs.ErrInvalid)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil
	}
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("%s:%d: want a list of `key: value` lines: %w", file, root.Line, errs.ErrInvalid)
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		at := fmt.Sprintf("%s:%d", file, key.Line)
		s, ok := findSetting(settings, key.Value)
		if !ok {
			return fmt.Errorf("%s: %w", at, unknownKey(settings, key.Value))
		}
		if earlier, ok := r.sources[s.Key]; ok {
			return fmt.Errorf("%s: %w", at, setting.Invalid(s.Key, "is set already at %s", earlier.Name))
		}
		text, err := nodeText(s, value)
		if err == nil {
			err = s.Set(text)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
		r.sources[s.Key] = Source{FromFile, at}
	}
	return nil
}

func findSetting(settings []setting.Setting, key string) (setting.Setting, bool) {
	for _, s := range settings {
		if s.Key == key {
			return s, true
		}
	}
	return setting.Setting{}, false
}

// unknownKey rejects a key and suggests a similar one.
func unknownKey(settings []setting.Setting, key string) error {
	plain := func(k string) string {
		return strings.ToLower(strings.NewReplacer("-", "", "_", "", ".", "").Replace(k))
	}
	for _, s := range settings {
		if plain(s.Key) == plain(key) {
			return setting.Invalid(key, "unknown key; it is written %s", s.Key)
		}
	}
	return setting.Invalid(key, "unknown key; `barchan config` prints all of them")
}

// nodeText is a YAML value as its setting's text.
func nodeText(s setting.Setting, n *yaml.Node) (string, error) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch n.Kind { //nolint:exhaustive // the rest is refused
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "", nil
		}
		return n.Value, nil
	case yaml.SequenceNode:
		if s.Kind() != "list" {
			return "", setting.Invalid(s.Key, "is a list, want one value")
		}
		items := make([]string, 0, len(n.Content))
		for _, item := range n.Content {
			if item.Kind != yaml.ScalarNode {
				return "", setting.Invalid(s.Key, "has an item that is not a plain value")
			}
			items = append(items, item.Value)
		}
		return strings.Join(items, ","), nil
	default:
		return "", setting.Invalid(s.Key, "want a plain value, not keys below it")
	}
}

// AddFlags registers a flag for every setting whose key want accepts. Call Load
// with the result once fs is parsed.
func AddFlags(fs *pflag.FlagSet, want func(key string) bool) *setting.Flags {
	defaults := Default()
	return setting.AddFlags(fs, slices.DeleteFunc(defaults.table(), func(s setting.Setting) bool { return !want(s.Key) }))
}

func lookupFlag(sets []*setting.Flags, key string) (string, bool) {
	for _, f := range sets {
		if text, ok := f.Lookup(key); ok {
			return text, true
		}
	}
	return "", false
}
