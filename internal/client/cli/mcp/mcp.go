// Package mcp has `barchan mcp`, a server of the Model Context Protocol: it gives the program of an AI agent tools that create sandboxes, run
// commands in them, read and write their files, fork them and take snapshots. It is a client of the REST API and of the sandboxes' agents, like
// the other commands.
//
// Specification: https://modelcontextprotocol.io/specification.
package mcp

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/modelcontextprotocol/go-sdk/auth"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

const (
	defaultTimeout = 30 * time.Minute
	// sessionIdle ends an HTTP session whose client has gone.
	sessionIdle = time.Hour
	// lastRequests is how long requests may take to end when the program stops.
	lastRequests      = 5 * time.Second
	readHeaderTimeout = 10 * time.Second
	// cleanupTime bounds the removal of a session's sandboxes.
	cleanupTime = 30 * time.Second
)

const instructions = "Barchan runs untrusted code in isolated Linux sandboxes. Create one with create_sandbox, then run commands in it with run_command, " +
	"and use its files with read_file and write_file. State is kept between calls. A sandbox ends at its timeout, which every use extends. " +
	"fork_sandbox copies a running sandbox with its memory, so that several ways can be tried from one state."

// options are the flags.
type options struct {
	listen, template string
	timeout          time.Duration
	keep             bool
}

// Command returns `barchan mcp`.
func Command(a *app.App) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "mcp",
		Short: "Give an AI agent's program tools for sandboxes (Model Context Protocol)",
		Long: "Serve the Model Context Protocol, by which programs of AI agents use sandboxes: they create them, run commands, use\n" +
			"files, fork, take snapshots.\n\n" +
			"Without --listen it speaks over standard input and output, as a program that the agent's program starts. When that\n" +
			"ends, the sandboxes that it created are killed, unless --keep is given. With --listen it serves streamable HTTP; every\n" +
			"request then needs a key of the REST API, as `Authorization: Bearer KEY`, and acts in the key's namespace. Sandboxes\n" +
			"end at their timeout there.",
		Example: "  barchan mcp\n" +
			"  barchan mcp --listen 127.0.0.1:7702",
	}
	cmd.Flags().StringVar(&o.listen, "listen", "", "address to serve HTTP at (default standard input and output)")
	cmd.Flags().StringVar(&o.template, "template", "base", "template of sandboxes for which the agent names none")
	cmd.Flags().DurationVar(&o.timeout, "timeout", defaultTimeout, "time without use after which a sandbox ends")
	cmd.Flags().BoolVar(&o.keep, "keep", false, "leave the sandboxes running at the end of standard input")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := app.AtLeastSecond(cmd, "timeout", o.timeout); err != nil {
			return err
		}
		if o.listen != "" {
			if o.keep {
				return app.Usage(cmd, errors.New("--keep: not with --listen, where sandboxes end at their timeout"))
			}
			return serveHTTP(cmd.Context(), a, o)
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error { return serveInput(cmd.Context(), a, t, o) })
	}
	return cmd
}

func newServer(a *app.App, s *session) *sdk.Server {
	server := sdk.NewServer(&sdk.Implementation{Name: "barchan", Title: "Barchan sandboxes", Version: a.Version().Version}, &sdk.ServerOptions{
		Instructions: instructions, Capabilities: &sdk.ServerCapabilities{},
	})
	s.addTools(server)
	return server
}

// serveInput serves one session until its input ends.
func serveInput(ctx context.Context, a *app.App, t *app.Server, o options) error {
	in, err := a.StandardInput(ctx)
	if err != nil {
		return err
	}
	s := newSession(t, o)
	err = newServer(a, s).Run(ctx, &sdk.IOTransport{Reader: io.NopCloser(in), Writer: keepOpen{a.Stdout}})
	if !o.keep {
		err = errors.Join(err, s.killAll(ctx))
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// keepOpen does not close standard output, which belongs to the program.
type keepOpen struct{ io.Writer }

// Close implements io.Closer.
func (keepOpen) Close() error { return nil }

// serveHTTP serves sessions until ctx is done.
func serveHTTP(ctx context.Context, a *app.App, o options) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	sessions := sdk.NewStreamableHTTPHandler(func(r *http.Request) *sdk.Server {
		t, ok := auth.TokenInfoFromContext(r.Context()).Extra[serverOfKey].(*app.Server)
		if !ok {
			return nil
		}
		return newServer(a, newSession(t, o))
	}, &sdk.StreamableHTTPOptions{SessionTimeout: sessionIdle})
	server := &http.Server{
		Handler:           auth.RequireBearerToken(verify(a), &auth.RequireBearerTokenOptions{AllowMissingExpiration: true})(sessions),
		ReadHeaderTimeout: readHeaderTimeout,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	fmt.Fprintf(a.Stderr, "barchan mcp: serving http://%s\n", l.Addr())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastRequests)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close() // streams of sessions do not end by themselves
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	}
	return ctx.Err()
}

// verify accepts keys of the REST API. A session belongs to the key that began it.
func verify(a *app.App) auth.TokenVerifier {
	return func(ctx context.Context, key string, _ *http.Request) (*auth.TokenInfo, error) {
		t, err := a.ServerWithKey(ctx, key)
		if err != nil {
			return nil, err
		}
		_, err = t.REST.Namespace(ctx)
		if errors.Is(err, errs.ErrUnauthenticated) {
			return nil, fmt.Errorf("the key is not valid: %w", auth.ErrInvalidToken)
		}
		hash := sha256.Sum256([]byte(key))
		return &auth.TokenInfo{UserID: hex.EncodeToString(hash[:]), Extra: map[string]any{serverOfKey: t}}, err
	}
}

// serverOfKey is the server in what a request has of its key.
const serverOfKey = "server"
