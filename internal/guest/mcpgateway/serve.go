package mcpgateway

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

const (
	// ready is written when clients are served.
	ready = "ready"

	readHeaderTimeout = 10 * time.Second
	// outputShown bounds what an error has of the output of a command that failed, in bytes.
	outputShown = 2000
)

// gateway serves what its servers have.
type gateway struct {
	server *sdk.Server
	// tools are the names of those that are served.
	tools map[string]bool
	log   *slog.Logger
}

// serve starts the servers and serves clients until ctx is done. It writes to started once: that it is ready, or an error.
func serve(ctx context.Context, sources []source, token string, started *os.File) error {
	g := &gateway{
		server: sdk.NewServer(&sdk.Implementation{Name: "barchan-mcp-gateway", Title: "MCP servers of a sandbox", Version: "1"}, nil),
		tools:  map[string]bool{}, log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	listener, err := g.begin(ctx, sources, token)
	text := ready
	if err != nil {
		text = err.Error()
	}
	_, writeErr := started.WriteString(text)
	if err := errors.Join(err, writeErr, started.Close()); err != nil {
		return err
	}
	srv := &http.Server{Handler: g.handler(token), ReadHeaderTimeout: readHeaderTimeout}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// begin has the port before it starts anything: a second gateway fails at once.
func (g *gateway) begin(ctx context.Context, sources []source, token string) (net.Listener, error) {
	listener, err := net.Listen("tcp", ":"+strconv.Itoa(Port)) //nolint:noctx // it does not wait
	if err != nil {
		return nil, fmt.Errorf("another gateway may run: %w", err)
	}
	for _, s := range sources {
		if err := g.add(ctx, s); err != nil {
			return nil, errors.Join(fmt.Errorf("github/%s: %w", s.name, err), listener.Close())
		}
	}
	if err := writeToken(TokenFile, token); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// handler serves clients with the token.
func (g *gateway) handler(token string) http.Handler {
	want := []byte("Bearer " + token)
	mcp := sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return g.server }, nil)
	mux := http.NewServeMux()
	mux.HandleFunc("/mcp", func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the token of the gateway is required, as Authorization: Bearer TOKEN", http.StatusUnauthorized)
			return
		}
		mcp.ServeHTTP(w, r)
	})
	return mux
}

// add fetches a server's code, installs and starts it, and serves what it has.
func (g *gateway) add(ctx context.Context, s source) error {
	dir := filepath.Join(codeDir, s.name)
	if _, err := os.Stat(dir); err != nil { // a template may have it
		if err := run(ctx, "", nil, "git", "clone", "--quiet", "--depth=1", "https://github.com/"+s.name, dir); err != nil {
			return fmt.Errorf("fetch the repository: %w", errors.Join(err, os.RemoveAll(dir)))
		}
		if s.InstallCmd != "" {
			if err := run(ctx, dir, s.Envs, "/bin/bash", "-c", s.InstallCmd); err != nil {
				return fmt.Errorf("installCmd: %w", errors.Join(err, os.RemoveAll(dir)))
			}
		}
	}
	client := sdk.NewClient(&sdk.Implementation{Name: "barchan-mcp-gateway", Version: "1"}, nil)
	server := command(ctx, dir, s.Envs, "/bin/bash", "-c", "exec "+s.RunCmd)
	server.Stderr = os.Stderr // the log
	session, err := client.Connect(ctx, &sdk.CommandTransport{Command: server}, nil)
	if err != nil {
		return fmt.Errorf("runCmd: start %q: %w; see %s", s.RunCmd, err, logFile)
	}
	go func() { g.log.ErrorContext(ctx, "MCP server ended", "server", s.name, "error", session.Wait()) }()
	return g.publish(ctx, s.name, session)
}

// run runs a command to its end. An error has the end of its output.
func run(ctx context.Context, dir string, envs map[string]string, name string, args ...string) error {
	out, err := command(ctx, dir, envs, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out[max(0, len(out)-outputShown):])))
	}
	return nil
}

// command is of a process that does not know the clients' token.
func command(ctx context.Context, dir string, envs map[string]string, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, tokenVariable+"=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	for k, v := range envs {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	return cmd
}

// publish serves the tools, prompts and resources of a session. A tool whose name another server has gets its repository's name
// before its own.
func (g *gateway) publish(ctx context.Context, name string, session *sdk.ClientSession) error {
	has := session.InitializeResult().Capabilities
	if has.Tools != nil {
		for t, err := range session.Tools(ctx, nil) {
			if err != nil {
				return fmt.Errorf("list tools: %w", err)
			}
			g.declare(name, "tool "+t.Name, func() { g.addTool(name, t, session) })
		}
	}
	if has.Prompts != nil {
		for p, err := range session.Prompts(ctx, nil) {
			if err != nil {
				return fmt.Errorf("list prompts: %w", err)
			}
			g.server.AddPrompt(p, func(ctx context.Context, r *sdk.GetPromptRequest) (*sdk.GetPromptResult, error) {
				return session.GetPrompt(ctx, &sdk.GetPromptParams{Name: p.Name, Arguments: r.Params.Arguments})
			})
		}
	}
	if has.Resources == nil {
		return nil
	}
	read := func(ctx context.Context, r *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
		return session.ReadResource(ctx, &sdk.ReadResourceParams{URI: r.Params.URI})
	}
	for r, err := range session.Resources(ctx, nil) {
		if err != nil {
			return fmt.Errorf("list resources: %w", err)
		}
		g.declare(name, "resource "+r.URI, func() { g.server.AddResource(r, read) })
	}
	for t, err := range session.ResourceTemplates(ctx, nil) {
		if err != nil { // few servers have them, and some refuse the question
			break
		}
		g.declare(name, "resource template "+t.URITemplate, func() { g.server.AddResourceTemplate(t, read) })
	}
	return nil
}

func (g *gateway) addTool(name string, t *sdk.Tool, session *sdk.ClientSession) {
	own := t.Name
	if g.tools[own] {
		t.Name = filepath.Base(name) + "_" + own
	}
	g.server.AddTool(t, func(ctx context.Context, r *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
		return session.CallTool(ctx, &sdk.CallToolParams{Name: own, Arguments: r.Params.Arguments})
	})
	g.tools[t.Name] = true
}

// declare serves one thing of a server. The SDK panics where a server describes it wrongly, which leaves out only that.
func (g *gateway) declare(name, what string, add func()) {
	defer func() {
		if wrong := recover(); wrong != nil {
			g.log.Warn("left out", "server", name, "what", what, "error", fmt.Sprint(wrong))
		}
	}()
	add()
}
