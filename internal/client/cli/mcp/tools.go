package mcp

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

const (
	// maxOutput bounds each stream of a command, in bytes: a model reads all of it.
	maxOutput = 32 << 10
	// maxRead bounds what read_file returns at once, in bytes.
	maxRead = 256 << 10
	// maxEntries bounds a list of files.
	maxEntries = 1000
	// maxForks bounds the copies of one call.
	maxForks              = 100
	defaultCommandTimeout = 2 * time.Minute
	maxCommandTimeout     = time.Hour
)

// session is what one client of the protocol does.
type session struct {
	on *app.Server
	o  options

	mu   sync.Mutex
	made map[string]bool // IDs of sandboxes; +checklocks:mu
}

func newSession(on *app.Server, o options) *session {
	return &session{on: on, o: o, made: map[string]bool{}}
}

// addTools offers the tools to a client.
func (s *session) addTools(server *sdk.Server) {
	add(server, "create_sandbox", "Create an isolated Linux sandbox and return its ID. It starts within milliseconds.", changes, s.create)
	add(server, "list_sandboxes", "List the sandboxes of this key, running and paused.", reads, s.list)
	add(server, "run_command", "Run a shell command in a sandbox to its end, and return its exit code and output. Long output is cut in the middle. "+
		"For a program that goes on, such as a server, end the command with & and redirect its output.", changes, s.run)
	add(server, "write_file", "Write a file of a sandbox, and the directories above it. An existing file is replaced.", changes, s.write)
	add(server, "read_file", "Read a file of a sandbox, or a part of it.", reads, s.read)
	add(server, "list_files", "List a directory of a sandbox.", reads, s.files)
	add(server, "port_url", "Return the URL at which a port of a sandbox is reached over HTTP, and the header that it needs.", reads, s.port)
	add(server, "snapshot_sandbox", "Take a snapshot of a sandbox with its memory. create_sandbox starts from it, as its template.", changes, s.snapshot)
	add(server, "fork_sandbox", "Copy a running sandbox, with its memory and files, into new ones.", changes, s.fork)
	add(server, "pause_sandbox", "Pause a sandbox. It keeps its memory and resumes with the next call that uses it.", changes, s.pause)
	add(server, "kill_sandbox", "End a sandbox and delete all that is in it.", ends, s.kill)
}

// Kinds of tools, as clients ask their users about them.
var (
	closed  = false
	reads   = &sdk.ToolAnnotations{ReadOnlyHint: true, OpenWorldHint: &closed}
	changes = &sdk.ToolAnnotations{DestructiveHint: new(false), OpenWorldHint: &closed}
	ends    = &sdk.ToolAnnotations{DestructiveHint: new(true), IdempotentHint: true, OpenWorldHint: &closed}
)

// add offers one tool. Its errors have the words that the command line prints.
func add[In, Out any](server *sdk.Server, name, description string, kind *sdk.ToolAnnotations, do func(context.Context, In) (Out, error)) {
	sdk.AddTool(server, &sdk.Tool{Name: name, Description: description, Annotations: kind}, func(ctx context.Context, _ *sdk.CallToolRequest, in In) (*sdk.CallToolResult, Out, error) {
		out, err := do(ctx, in)
		if err != nil {
			err = errors.New(app.Message(err))
		}
		return nil, out, err
	})
}

type createIn struct {
	Template string            `json:"template,omitempty" jsonschema:"template or snapshot to start from; the default has Python and Node.js"`
	Env      map[string]string `json:"env,omitempty" jsonschema:"environment variables of all commands"`
	Metadata map[string]string `json:"metadata,omitempty" jsonschema:"labels to find the sandbox by"`
	Allow    []string          `json:"allow_hosts,omitempty" jsonschema:"the only hosts, such as pypi.org, that the sandbox may reach; without any it reaches all public ones"`
	Offline  bool              `json:"offline,omitempty" jsonschema:"the sandbox reaches no network"`
}

type sandboxOut struct {
	ID       string            `json:"sandbox_id"`
	Template string            `json:"template,omitempty"`
	State    string            `json:"state,omitempty"`
	EndsAt   *time.Time        `json:"ends_at,omitempty" jsonschema:"when it ends without further use"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func (s *session) create(ctx context.Context, in createIn) (sandboxOut, error) {
	n := client.CreateOptions{TemplateID: in.Template, Timeout: s.o.timeout, EnvVars: in.Env, Metadata: in.Metadata}
	if n.TemplateID == "" {
		n.TemplateID = s.o.template
	}
	switch {
	case in.Offline && len(in.Allow) > 0:
		return sandboxOut{}, fmt.Errorf("offline: not with allow_hosts: %w", errs.ErrInvalid)
	case in.Offline:
		n.Internet = new(false)
	case len(in.Allow) > 0:
		n.Network = &client.Network{AllowOut: in.Allow, DenyOut: []string{"0.0.0.0/0"}}
	}
	made, err := s.on.REST.Create(ctx, n)
	if err != nil {
		return sandboxOut{}, err
	}
	s.remember(made.SandboxID)
	return sandboxOut{ID: made.SandboxID, Template: n.TemplateID, State: client.StateRunning, EndsAt: new(time.Now().Add(s.o.timeout).Truncate(time.Second))}, nil
}

func (s *session) remember(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		s.made[id] = true
	}
}

// killAll kills what the session has made and left.
func (s *session) killAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	s.mu.Lock()
	ids := slices.Sorted(maps.Keys(s.made))
	s.mu.Unlock()
	var failed []error
	for _, id := range ids {
		if err := s.on.REST.Kill(ctx, id); err != nil && !errors.Is(err, errs.ErrNotFound) {
			failed = append(failed, fmt.Errorf("kill sandbox %s: %w", id, err))
		}
	}
	return errors.Join(failed...)
}

type nothing struct{}

type listOut struct {
	Sandboxes []sandboxOut `json:"sandboxes"`
}

func (s *session) list(ctx context.Context, _ nothing) (listOut, error) {
	all, err := s.on.REST.List(ctx, client.ListOptions{States: app.AnyState()})
	out := listOut{Sandboxes: []sandboxOut{}}
	for i := range all {
		x := &all[i]
		out.Sandboxes = append(out.Sandboxes, sandboxOut{ID: x.SandboxID, Template: x.TemplateID, State: x.State, EndsAt: &x.EndAt, Metadata: x.Metadata})
	}
	return out, err
}

type sandboxIn struct {
	ID string `json:"sandbox_id" jsonschema:"ID of the sandbox"`
}

// use resumes a sandbox, extends its time, and returns a client of its agent.
func (s *session) use(ctx context.Context, id, user string) (*app.Sandbox, error) {
	got, err := s.on.REST.Connect(ctx, id, client.ConnectOptions{Timeout: s.o.timeout})
	if err != nil {
		return nil, err
	}
	client, err := s.on.Agent(got.SandboxID, got.AgentToken, user)
	return &app.Sandbox{Server: s.on, ID: got.SandboxID, Client: client}, err
}

type runIn struct {
	sandboxIn
	Command string            `json:"command" jsonschema:"line for bash, or for sh where that is missing"`
	Workdir string            `json:"workdir,omitempty" jsonschema:"directory to run in; default the user's home"`
	User    string            `json:"user,omitempty" jsonschema:"user to run as; default the template's"`
	Env     map[string]string `json:"env,omitempty" jsonschema:"more environment variables"`
	Input   string            `json:"stdin,omitempty" jsonschema:"standard input of the command"`
	Seconds int               `json:"timeout_seconds,omitempty" jsonschema:"time after which the command is killed; default 120, at most 3600"`
}

type runOut struct {
	Code     int    `json:"exit_code"`
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	TimedOut bool   `json:"timed_out,omitempty"`
}

// shell runs its argument with bash where that is.
const shell = `command -v bash >/dev/null 2>&1 && exec bash -c "$1"; exec sh -c "$1"`

func (s *session) run(ctx context.Context, in runIn) (runOut, error) {
	limit := defaultCommandTimeout
	if in.Seconds != 0 {
		limit = time.Duration(in.Seconds) * time.Second
	}
	if limit < 0 || limit > maxCommandTimeout {
		return runOut{}, fmt.Errorf("timeout_seconds: %d is out of range, want 1 to %d: %w", in.Seconds, maxCommandTimeout/time.Second, errs.ErrInvalid)
	}
	on, err := s.use(ctx, in.ID, in.User)
	if err != nil {
		return runOut{}, err
	}
	var stdout, stderr excerpt
	o := envd.ExecOptions{Stdout: &stdout, Stderr: &stderr, Env: in.Env, Dir: in.Workdir}
	if in.Input != "" {
		o.Stdin = strings.NewReader(in.Input)
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	code, err := on.Client.Exec(limited, []string{"/bin/sh", "-c", shell, "sh", in.Command}, o)
	out := runOut{Code: code, Stdout: stdout.String(), Stderr: stderr.String()}
	switch {
	case err == nil:
		return out, nil
	case ctx.Err() == nil && limited.Err() != nil:
		out.Code, out.TimedOut = 124, true // as of timeout(1)
		return out, nil
	}
	return runOut{}, on.Lost(ctx, err)
}

type writeIn struct {
	sandboxIn
	Path    string `json:"path" jsonschema:"absolute, or relative to the user's home"`
	Content string `json:"content"`
	Base64  bool   `json:"base64,omitempty" jsonschema:"content is base64, for files that are not text"`
	User    string `json:"user,omitempty" jsonschema:"owner of the file; default the template's user"`
}

type writeOut struct {
	Path  string `json:"path"`
	Bytes int    `json:"bytes"`
}

func (s *session) write(ctx context.Context, in writeIn) (writeOut, error) {
	content := []byte(in.Content)
	if in.Base64 {
		var err error
		if content, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return writeOut{}, fmt.Errorf("content: not base64: %w: %w", err, errs.ErrInvalid)
		}
	}
	on, err := s.use(ctx, in.ID, in.User)
	if err != nil {
		return writeOut{}, err
	}
	info, err := on.Client.Upload(ctx, in.Path, strings.NewReader(string(content)), nil)
	if err != nil {
		return writeOut{}, on.Lost(ctx, err)
	}
	return writeOut{Path: info.Path, Bytes: len(content)}, nil
}

type readIn struct {
	sandboxIn
	Path   string `json:"path" jsonschema:"absolute, or relative to the user's home"`
	Offset int64  `json:"offset,omitempty" jsonschema:"byte to begin at"`
	Bytes  int64  `json:"max_bytes,omitempty" jsonschema:"most bytes to return; default and limit 262144"`
	User   string `json:"user,omitempty" jsonschema:"user to read as; default the template's"`
}

type readOut struct {
	Content string `json:"content"`
	Base64  bool   `json:"base64,omitempty" jsonschema:"content is base64, because the file is not text"`
	Next    int64  `json:"next_offset,omitempty" jsonschema:"where the file goes on; missing at its end"`
}

func (s *session) read(ctx context.Context, in readIn) (readOut, error) {
	if in.Bytes == 0 {
		in.Bytes = maxRead
	}
	if in.Offset < 0 || in.Bytes < 0 || in.Bytes > maxRead {
		return readOut{}, fmt.Errorf("offset, max_bytes: out of range, want 0 or more, and at most %d bytes: %w", maxRead, errs.ErrInvalid)
	}
	on, err := s.use(ctx, in.ID, in.User)
	if err != nil {
		return readOut{}, err
	}
	file, err := on.Client.Download(ctx, in.Path)
	if err != nil {
		return readOut{}, on.Lost(ctx, err)
	}
	defer func() { _ = file.Close() }() // it was only read
	if _, err = io.CopyN(io.Discard, file, in.Offset); errors.Is(err, io.EOF) {
		return readOut{}, nil
	}
	var content []byte
	if err == nil {
		content, err = io.ReadAll(io.LimitReader(file, in.Bytes+1))
	}
	if err != nil {
		return readOut{}, on.Lost(ctx, err)
	}
	var out readOut
	if int64(len(content)) > in.Bytes {
		content = wholeRunes(content[:in.Bytes])
		out.Next = in.Offset + int64(len(content))
	}
	if out.Content = string(content); !utf8.Valid(content) {
		out.Content, out.Base64 = base64.StdEncoding.EncodeToString(content), true
	}
	return out, nil
}

// wholeRunes cuts off a UTF-8 character that content has the first bytes of at its end, unless it is all there is.
func wholeRunes(content []byte) []byte {
	for n := 1; n < utf8.UTFMax && n < len(content); n++ {
		if end := len(content) - n; utf8.RuneStart(content[end]) {
			if !utf8.FullRune(content[end:]) {
				return content[:end]
			}
			break
		}
	}
	return content
}

type filesIn struct {
	sandboxIn
	Path  string `json:"path" jsonschema:"absolute, or relative to the user's home"`
	Depth uint32 `json:"depth,omitempty" jsonschema:"levels of directories to list; default 1"`
	User  string `json:"user,omitempty" jsonschema:"user to read as; default the template's"`
}

type fileOut struct {
	Path string `json:"path"`
	Type string `json:"type" jsonschema:"file, directory or symlink"`
	Size int64  `json:"size" jsonschema:"bytes"`
}

type filesOut struct {
	Entries []fileOut `json:"entries"`
	More    bool      `json:"more,omitempty" jsonschema:"there are more than are listed"`
}

func (s *session) files(ctx context.Context, in filesIn) (filesOut, error) {
	on, err := s.use(ctx, in.ID, in.User)
	if err != nil {
		return filesOut{}, err
	}
	res, err := on.Client.Filesystem().ListDir(ctx, connect.NewRequest(&filesystempb.ListDirRequest{Path: in.Path, Depth: max(1, in.Depth)}))
	if err != nil {
		return filesOut{}, on.Lost(ctx, err)
	}
	all := res.Msg.GetEntries()
	out := filesOut{Entries: []fileOut{}, More: len(all) > maxEntries}
	for _, e := range all[:min(len(all), maxEntries)] {
		kind := strings.ToLower(strings.TrimPrefix(e.GetType().String(), "FILE_TYPE_"))
		out.Entries = append(out.Entries, fileOut{Path: e.GetPath(), Type: kind, Size: e.GetSize()})
	}
	return out, nil
}

type portIn struct {
	sandboxIn
	Port int `json:"port" jsonschema:"port that a program in the sandbox listens on"`
}

type portOut struct {
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers,omitempty" jsonschema:"headers that a request needs"`
}

func (s *session) port(ctx context.Context, in portIn) (portOut, error) {
	if in.Port < 1 || in.Port > 65535 {
		return portOut{}, fmt.Errorf("port: %d is out of range, want 1 to 65535: %w", in.Port, errs.ErrInvalid)
	}
	got, err := s.on.REST.Connect(ctx, in.ID, client.ConnectOptions{Timeout: s.o.timeout})
	if err != nil {
		return portOut{}, err
	}
	base, h := got.Address(in.Port)
	out := portOut{URL: base, Headers: map[string]string{}}
	for name := range h {
		out.Headers[name] = h.Get(name)
	}
	return out, nil
}

type snapshotIn struct {
	sandboxIn
	Name string `json:"name,omitempty" jsonschema:"name of the snapshot"`
}

type snapshotOut struct {
	ID string `json:"snapshot_id"`
}

func (s *session) snapshot(ctx context.Context, in snapshotIn) (snapshotOut, error) {
	made, err := s.on.REST.CreateSnapshot(ctx, in.ID, client.SnapshotOptions{Name: in.Name})
	return snapshotOut{ID: made.SnapshotID}, err
}

type forkIn struct {
	sandboxIn
	Count int `json:"count,omitempty" jsonschema:"number of copies; default 1, at most 100"`
}

type forkOut struct {
	IDs    []string `json:"sandbox_ids"`
	Errors []string `json:"errors,omitempty" jsonschema:"why copies could not be made"`
}

func (s *session) fork(ctx context.Context, in forkIn) (forkOut, error) {
	if in.Count < 0 || in.Count > maxForks {
		return forkOut{}, fmt.Errorf("count: %d is out of range, want 1 to %d: %w", in.Count, maxForks, errs.ErrInvalid)
	}
	out := forkOut{IDs: []string{}}
	err := s.on.REST.ForkEach(ctx, in.ID, client.ForkOptions{Count: max(1, in.Count), Timeout: s.o.timeout}, func(_ int, f client.Forked) {
		switch {
		case f.Sandbox != nil:
			out.IDs = append(out.IDs, f.Sandbox.SandboxID)
		case f.Error != nil:
			out.Errors = append(out.Errors, f.Error.Message)
		}
	})
	s.remember(out.IDs...)
	return out, err
}

func (s *session) pause(ctx context.Context, in sandboxIn) (sandboxOut, error) {
	return sandboxOut{ID: in.ID, State: client.StatePaused}, s.on.REST.Pause(ctx, in.ID, client.PauseOptions{})
}

func (s *session) kill(ctx context.Context, in sandboxIn) (sandboxOut, error) {
	err := s.on.REST.Kill(ctx, in.ID)
	if errors.Is(err, errs.ErrNotFound) { // it has ended already
		err = nil
	}
	if err == nil {
		s.mu.Lock()
		delete(s.made, in.ID)
		s.mu.Unlock()
	}
	return sandboxOut{ID: in.ID, State: "killed"}, err
}
