package agent

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Limits of the runtime API: bytes of each output of a command, and entries of a list.
const (
	maxOutput  = 2 << 20 // as JSON, within the 16 MiB that clients read
	maxEntries = 50_000
)

// executed is the answer to a command.
type executed struct {
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	ExitCode int    `json:"exit_code"`
}

// postExecute runs a command line, without a shell, as agent-sandbox's runtime does. A program that cannot be started has the exit
// code 1.
func (a *Agent) postExecute(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Command string `json:"command"`
	}
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	argv, err := splitCommand(req.Command)
	if err != nil {
		return reply.Refuse(http.StatusBadRequest, "command: %v", err)
	}
	acc, err := a.users.Named(r.URL.Query().Get(envd.QueryUsername))
	if err != nil {
		return reply.WithStatus(http.StatusBadRequest, err)
	}
	out, err := a.processes.Run(r.Context(), acc, argv, maxOutput)
	if failed, ok := errors.AsType[*connect.Error](err); ok && failed.Code() != connect.CodeUnavailable {
		return reply.JSON(w, executed{Stderr: "Failed to execute command: " + failed.Message(), ExitCode: 1})
	}
	if err != nil {
		return reply.WithStatus(http.StatusServiceUnavailable, err)
	}
	if out.Cut {
		out.Stderr = fmt.Appendf(out.Stderr, "\nbarchan: each output is cut at %d bytes\n", maxOutput)
	}
	return reply.JSON(w, executed{string(out.Stdout), string(out.Stderr), out.Code})
}

// splitCommand splits a command line into words by the quoting rules of POSIX shells, and expands nothing.
func splitCommand(line string) ([]string, error) {
	var s splitter
	for _, c := range line {
		s.take(c)
	}
	s.endWord()
	switch {
	case s.quote != 0 || s.escaped:
		return nil, errors.New("a quotation or an escape does not end")
	case len(s.words) == 0:
		return nil, errors.New("a command is needed")
	}
	return s.words, nil
}

// splitter is the state of splitCommand.
type splitter struct {
	words   []string
	word    strings.Builder
	begun   bool // the word, which may be empty
	quote   rune // that is open, or zero
	escaped bool
}

func (s *splitter) take(c rune) {
	switch {
	case s.escaped:
		if s.quote == '"' && !strings.ContainsRune("\"\\$`\n", c) {
			s.word.WriteRune('\\')
		}
		s.word.WriteRune(c)
		s.escaped = false
	case c == '\\' && s.quote != '\'':
		s.escaped, s.begun = true, true
	case s.quote != 0 && c == s.quote:
		s.quote = 0
	case s.quote == 0 && (c == '\'' || c == '"'):
		s.quote, s.begun = c, true
	case s.quote == 0 && strings.ContainsRune(" \t\r\n", c):
		s.endWord()
	default:
		s.word.WriteRune(c)
		s.begun = true
	}
}

func (s *splitter) endWord() {
	if s.begun {
		s.words = append(s.words, s.word.String())
	}
	s.word.Reset()
	s.begun = false
}

// atPath has a handler read the path of the URL as the query's: encoded, so that it may begin with a slash.
func atPath(h func(http.ResponseWriter, *http.Request) error) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		at := *r
		at.URL = &url.URL{Path: r.URL.Path, RawQuery: url.Values{
			envd.QueryPath: {r.PathValue("path")}, envd.QueryUsername: r.URL.Query()[envd.QueryUsername],
		}.Encode()}
		return h(w, &at)
	}
}

// pathOf returns the path of a request, relative to the user's home.
func (a *Agent) pathOf(r *http.Request) (string, error) {
	acc, err := a.users.Named(r.URL.Query().Get(envd.QueryUsername))
	if err != nil {
		return "", reply.WithStatus(http.StatusBadRequest, err)
	}
	_, workdir := a.settings.Defaults()
	path, err := account.ResolvePath(r.URL.Query().Get(envd.QueryPath), acc, workdir)
	if err != nil {
		return "", reply.WithStatus(http.StatusBadRequest, err)
	}
	return path, nil
}

// listed is an entry of a directory.
type listed struct {
	Name    string  `json:"name"`
	Size    int64   `json:"size"`
	Type    string  `json:"type"`
	ModTime float64 `json:"mod_time"` // seconds
}

// getList lists a directory. Entries that are neither files nor directories, once links are followed, are left out.
func (a *Agent) getList(w http.ResponseWriter, r *http.Request) error {
	path, err := a.pathOf(r)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return reply.Refuse(http.StatusNotFound, "path '%s' is not a directory", path)
	}
	if len(entries) > maxEntries {
		return reply.Refuse(http.StatusRequestEntityTooLarge, "path '%s' has %d entries, more than %d", path, len(entries), maxEntries)
	}
	list := make([]listed, 0, len(entries))
	for _, e := range entries {
		st, err := os.Stat(path + "/" + e.Name())
		if err != nil {
			continue // removed meanwhile, or a link to nothing
		}
		l := listed{Name: e.Name(), Size: st.Size(), Type: "file", ModTime: float64(st.ModTime().UnixMicro()) / 1e6}
		switch {
		case st.IsDir():
			l.Type = "directory"
		case !st.Mode().IsRegular():
			continue
		}
		list = append(list, l)
	}
	return reply.JSON(w, list)
}

// getExists reports whether there is something at a path.
func (a *Agent) getExists(w http.ResponseWriter, r *http.Request) error {
	path, err := a.pathOf(r)
	if err != nil {
		return err
	}
	_, err = os.Stat(path)
	return reply.JSON(w, map[string]any{"path": r.URL.Query().Get(envd.QueryPath), "exists": err == nil})
}
