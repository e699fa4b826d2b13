package dockerfile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// defaultPath is the PATH of images that set none, as Docker has it.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// proxyArgs need no ARG.
var proxyArgs = []string{
	"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "FTP_PROXY", "ftp_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy",
}

// platformArgs are those that Docker sets by itself.
var platformArgs = []string{
	"TARGETPLATFORM", "TARGETOS", "TARGETARCH", "TARGETVARIANT", "BUILDPLATFORM", "BUILDOS", "BUILDARCH", "BUILDVARIANT",
}

// variables are names with values.
type variables map[string]string

func (v variables) set(name, value string) { v[name] = value }

// Get and Keys are for package shell.
func (v variables) Get(name string) (string, bool) {
	value, ok := v[name]
	return value, ok
}

// Keys returns the names.
func (v variables) Keys() []string { return slices.Sorted(maps.Keys(v)) }

// scope returns what $NAME stands for: ENV wins over ARG.
func (t *translator) scope() variables {
	all := variables{"PATH": defaultPath}
	maps.Copy(all, t.args)
	maps.Copy(all, t.env)
	return all
}

// expander returns a function that expands words of the instruction of a line.
func (t *translator) expander(line int) func(word string) (string, error) {
	scope := t.scope()
	return func(word string) (string, error) { return t.expandWith(line, word, scope) }
}

// expandWith expands a word, and notes the variables without a value. Those of the image are among them, for it is not read here.
func (f *file) expandWith(line int, word string, scope variables) (string, error) {
	result, err := f.lex.ProcessWordWithMatches(word, scope)
	if err != nil {
		return "", fmt.Errorf("expand %s: %w", word, cause(err))
	}
	if _, ok := result.Matched["PATH"]; ok && scope["PATH"] == defaultPath {
		f.note(line, "$PATH is taken as %s: that of the image is not known here", defaultPath)
	}
	for _, name := range slices.Sorted(maps.Keys(result.Unmatched)) {
		if strings.Contains(word, "$"+name) || strings.Contains(word, "${"+name+"}") { // not ${name:-default}
			f.note(line, "$%s is taken as empty: no ENV or ARG sets it, and variables of the image are not known here", name)
		}
	}
	return result.Result, nil
}

// cause returns the innermost error: those of package shell repeat the word.
func cause(err error) error {
	for inner := err; inner != nil; inner = errors.Unwrap(inner) {
		err = inner
	}
	return err
}

// declare gives the arguments of an ARG instruction their values: of the command line, else of the instruction, else of outer.
func (t *translator) declare(line int, c *instructions.ArgCommand, into, outer variables) {
	for _, arg := range c.Args {
		scope := into
		if outer != nil {
			scope = t.scope()
		}
		name, err := t.expandWith(line, arg.Key, scope)
		if err != nil {
			t.fault(line, "ARG %s: %v", arg.Key, err)
			continue
		}
		t.used[name] = true
		value, given := t.opt.BuildArgs[name]
		global, isGlobal := outer[name]
		switch {
		case given:
			into.set(name, value)
		case arg.Value != nil:
			if value, err = t.expandWith(line, *arg.Value, scope); err != nil {
				t.fault(line, "ARG %s: %v", name, err)
				continue
			}
			into.set(name, value)
		case isGlobal:
			into.set(name, global)
		case slices.Contains(platformArgs, name):
			t.note(line, "ARG %s has no value: the platform of the server is not known here; set it by --build-arg", name)
		}
	}
}

// exports returns the beginning of a command with the arguments in scope, and the PATH of ENV.
func (t *translator) exports() string {
	var words []string
	for _, name := range t.args.Keys() {
		if _, hidden := t.env[name]; !hidden && isIdentifier(name) {
			words = append(words, name+"="+quote(t.args[name]))
		}
	}
	export := t.path()
	if len(words) > 0 {
		export = "export " + strings.Join(words, " ") + "; " + export
	}
	return export
}

// path returns the beginning of a command with the PATH of ENV: the profile of the login shell that runs commands may set another.
func (t *translator) path() string {
	if path, ok := t.env["PATH"]; ok {
		return fmt.Sprintf("export PATH=%s; ", quote(path))
	}
	return ""
}

func isIdentifier(name string) bool {
	for i, c := range name {
		if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}

// quote joins words for a shell.
func quote(words ...string) string {
	const safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:,+@%"
	quoted := make([]string, len(words))
	for i, word := range words {
		if word == "" || strings.Trim(word, safe) != "" {
			word = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		quoted[i] = word
	}
	return strings.Join(quoted, " ")
}
