package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/errs"
)

func (a *app) portCommand() *cobra.Command {
	var forward string
	var tls bool
	cmd := &cobra.Command{
		Use:   "port ID PORT",
		Short: "Print the URL of a port of a sandbox, or forward a local port to it",
		Long: "Print the URL under which the gateway serves a port of a sandbox.\n" +
			"With --forward, serve it on a local port until Ctrl-C; HTTP and WebSocket are forwarded, no other protocol.",
		Example: "  barchan port i3k 8000\n  barchan port i3k 8000 --forward 127.0.0.1:9000",
		Args:    exactly("ID", "PORT"),
	}
	cmd.Flags().StringVar(&forward, "forward", "", "local ADDRESS:PORT or PORT to serve on")
	cmd.Flags().BoolVar(&tls, "tls", false, "print the URL of the TLS listener")
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		port, err := strconv.ParseUint(args[1], 10, 16)
		if err != nil || port == 0 {
			return &usageError{cmd, fmt.Errorf("PORT: %q is not a number from 1 to 65535", args[1])}
		}
		ctx := cmd.Context()
		return a.withTarget(ctx, func(t *target) error {
			id, err := t.resolve(ctx, args[0])
			if err != nil {
				return err
			}
			if _, err := t.rest.Get(ctx, id); err != nil {
				return err
			}
			if forward != "" {
				return a.forward(ctx, t, id, int(port), forward)
			}
			plain, secure, err := a.portURLs(ctx, t, id, int(port))
			if err != nil {
				return err
			}
			return a.printURLs(plain, secure, tls)
		})
	}
	return cmd
}

func (a *app) printURLs(plain, secure string, tls bool) error {
	if a.json {
		return a.printJSON(map[string]string{"url": plain, "tlsURL": secure})
	}
	if tls {
		if secure == "" {
			return fmt.Errorf("the server does not serve TLS; leave out --tls: %w", errs.ErrInvalid)
		}
		plain = secure
	}
	fmt.Fprintln(a.stdout, plain)
	return nil
}

// portURLs are the URLs by host: of the local server by its domain, of another
// as the API's URL has it.
func (a *app) portURLs(ctx context.Context, t *target, id string, port int) (plain, secure string, err error) {
	label := fmt.Sprintf("%d-%s", port, id)
	if a.first(a.apiURL, envAPIURL) != "" {
		u, err := url.Parse(t.url)
		if err != nil {
			return "", "", err
		}
		if _, err := netip.ParseAddr(u.Hostname()); err == nil {
			return "", "", fmt.Errorf("%s has no domain for URLs; use --forward: %w", t.url, errs.ErrInvalid)
		}
		plain = u.Scheme + "://" + label + "." + strings.TrimPrefix(u.Host, "api.")
		if u.Scheme == "https" {
			secure = plain
		}
		return plain, secure, nil
	}
	s, err := a.localServer(ctx)
	if err != nil {
		return "", "", err
	}
	host, _, err := net.SplitHostPort(s.Addresses.Domain)
	if err != nil {
		host = s.Addresses.Domain
	}
	_, httpPort, err := net.SplitHostPort(s.Addresses.HTTP)
	if err != nil {
		return "", "", fmt.Errorf("address of the server: %w", err)
	}
	plain = "http://" + label + "." + net.JoinHostPort(host, httpPort)
	if s.Addresses.TLS != "" {
		secure = "https://" + label + "." + s.Addresses.Domain
	}
	return plain, secure, nil
}

func (a *app) forward(ctx context.Context, t *target, id string, port int, local string) error {
	if !strings.Contains(local, ":") {
		local = "127.0.0.1:" + local
	}
	base, header := t.sandboxAddress(id, port)
	to, err := url.Parse(base)
	if err != nil {
		return fmt.Errorf("address of the sandbox: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", local)
	if err != nil {
		return fmt.Errorf("--forward: %w", err)
	}
	talk := slog.New(slog.NewTextHandler(a.stderr, nil))
	srv := &http.Server{
		Handler:           forwarder(to, header, t.http.Transport, talk),
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          slog.NewLogLogger(talk.Handler(), slog.LevelWarn),
	}
	fmt.Fprintf(a.stderr, "http://%s is port %d of sandbox %s; Ctrl-C ends this\n", l.Addr(), port, id)
	return serveUntil(ctx, srv, l)
}

func serveUntil(ctx context.Context, srv *http.Server, l net.Listener) error {
	over, end := context.WithCancel(ctx)
	defer end()
	var served error
	var wg sync.WaitGroup
	wg.Go(func() {
		served = srv.Serve(l)
		end()
	})
	<-over.Done()
	err := srv.Close() // streams would hold a gentler end for ever
	wg.Wait()
	if ctx.Err() != nil || errors.Is(served, http.ErrServerClosed) {
		return err
	}
	return served
}

// forwarder sends requests on with the headers that route them. The Host that
// the client asked for would mean another route, and goes.
func forwarder(to *url.URL, header http.Header, transport http.RoundTripper, talk *slog.Logger) http.Handler {
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = to.Host
			maps.Copy(r.Out.Header, header)
		},
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(talk.Handler(), slog.LevelWarn),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, "barchan port: "+err.Error(), http.StatusBadGateway)
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 needs no such thing
		proxy.ServeHTTP(w, r)
	})
}
