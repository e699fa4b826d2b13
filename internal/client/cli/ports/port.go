// Package ports has the commands on ports of sandboxes: their list, URLs, and forwarding.
package ports

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

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// PortCommand returns `barchan port`.
func PortCommand(a *app.App) *cobra.Command {
	var forward string
	var tls bool
	var expires time.Duration
	cmd := &cobra.Command{
		Use:     "port SANDBOX PORT",
		Aliases: []string{"open"},
		Short:   "Print the URL of a port of a sandbox, or forward a local port to it",
		Long: "Print the URL under which the gateway serves a port of a sandbox.\n" +
			"With --expires, it is signed: for that long, the URL reaches this port of a private sandbox, by any path.\n" +
			"With --forward, serve it on a local port until Ctrl-C; HTTP and WebSocket are forwarded, no other protocol.",
		Example: "  barchan port i3k 8000\n  barchan port i3k 8000 --forward 127.0.0.1:9000\n  barchan open i3k 8000 --expires 10m",
	}
	cmd.Flags().StringVar(&forward, "forward", "", "local ADDRESS:PORT or PORT to serve on")
	cmd.Flags().BoolVar(&tls, "tls", false, "print the URL of the TLS listener")
	cmd.Flags().DurationVar(&expires, "expires", 0, "sign the URL, for this long")
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		port, err := strconv.ParseUint(args[1], 10, 16)
		if err != nil || port == 0 {
			return app.Usage(cmd, fmt.Errorf("PORT: %q is not a number from 1 to 65535", args[1]))
		}
		signs := cmd.Flags().Changed("expires")
		if err := checkExpires(signs, expires, port, forward); err != nil {
			return app.Usage(cmd, err)
		}
		ctx := cmd.Context()
		return a.WithServer(ctx, func(t *app.Server) error {
			id, err := t.Resolve(ctx, args[0])
			if err != nil {
				return err
			}
			detail, err := t.REST.Get(ctx, id)
			if err != nil {
				return err
			}
			if forward != "" {
				return serveForward(ctx, a, t, id, int(port), forward)
			}
			plain, secure, err := portURLs(ctx, a, t, id, int(port))
			if err != nil {
				return err
			}
			if signs {
				query, err := signedQuery(ctx, a, t, &detail, uint16(port), expires)
				if err != nil {
					return err
				}
				plain, secure = withQuery(plain, query), withQuery(secure, query)
			}
			return printURLs(a, plain, secure, tls)
		})
	}
	return cmd
}

func checkExpires(signs bool, expires time.Duration, port uint64, forward string) error {
	switch {
	case !signs:
		return nil
	case expires < time.Second:
		return fmt.Errorf("--expires: %s is too short, want at least 1s", expires)
	case forward != "":
		return errors.New("--expires: what --forward serves is not a signed URL; leave out one of them")
	case port == envd.Port:
		return fmt.Errorf("--expires: port %d is the agent's, which has signatures of its own for files", port)
	}
	return nil
}

// signedQuery returns a query that gives access to its bearer. The API returns the signing token from
// Connect, which does not change a running sandbox. Empty: none is needed.
func signedQuery(ctx context.Context, a *app.App, t *app.Server, d *client.SandboxDetail, port uint16, expires time.Duration) (url.Values, error) {
	if d.Network == nil || d.Network.AllowPublicTraffic == nil || *d.Network.AllowPublicTraffic {
		fmt.Fprintln(a.Stderr, "traffic to this sandbox is public: its URL needs no signature, and does not expire")
		return nil, nil //nolint:nilnil // it is a map
	}
	if d.State != client.StateRunning {
		return nil, fmt.Errorf("sandbox %s is %s, and the token that signs its URLs is available only while it runs; resume it first: %w", d.SandboxID, d.State, errs.ErrConflict)
	}
	// If it is paused just now, it is resumed for its remaining time.
	s, err := t.REST.Connect(ctx, d.SandboxID, client.ConnectOptions{Timeout: max(time.Second, time.Until(d.EndAt).Truncate(time.Second))})
	if err != nil {
		return nil, err
	}
	if s.TrafficToken == "" {
		return nil, fmt.Errorf("the server returned no traffic token of sandbox %s: %w", d.SandboxID, errs.ErrUnavailable)
	}
	return signedurl.Query(s.TrafficToken, port, time.Now().Add(expires)), nil
}

// withQuery adds a query, if not empty, to a URL.
func withQuery(address string, query url.Values) string {
	if address == "" || len(query) == 0 {
		return address
	}
	return address + "/?" + query.Encode()
}

func printURLs(a *app.App, plain, secure string, tls bool) error {
	if a.JSON {
		return a.PrintJSON(map[string]string{"url": plain, "tlsURL": secure})
	}
	if tls {
		if secure == "" {
			return fmt.Errorf("the server does not serve TLS; leave out --tls: %w", errs.ErrInvalid)
		}
		plain = secure
	}
	fmt.Fprintln(a.Stdout, plain)
	return nil
}

// portURLs returns the URLs by host: for the data directory's server by its domain, for another by the
// API's URL.
func portURLs(ctx context.Context, a *app.App, t *app.Server, id string, port int) (plain, secure string, err error) {
	label := fmt.Sprintf("%d-%s", port, id)
	s, err := a.LocalServer(ctx)
	if err != nil || t.URL != "http://"+app.Dialable(s.Addresses.HTTP) {
		return remoteURLs(a, t, label)
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

// remoteURLs is for a server that is not the data directory's.
func remoteURLs(a *app.App, t *app.Server, label string) (plain, secure string, err error) {
	u, err := url.Parse(t.URL)
	if err != nil {
		return "", "", err
	}
	host := strings.TrimPrefix(u.Host, "api.")
	if _, err := netip.ParseAddr(u.Hostname()); err == nil {
		if host = a.First("", app.EnvE2BDomain); host == "" {
			return "", "", fmt.Errorf("%s has no domain for URLs; set %s, or use --forward: %w", t.URL, app.EnvE2BDomain, errs.ErrInvalid)
		}
		u.Scheme = "https" // as E2B's clients reach a domain
	}
	plain = u.Scheme + "://" + label + "." + host
	if u.Scheme == "https" {
		secure = plain
	}
	return plain, secure, nil
}

func serveForward(ctx context.Context, a *app.App, t *app.Server, id string, port int, local string) error {
	if !strings.Contains(local, ":") {
		local = "127.0.0.1:" + local
	}
	base, header := t.REST.SandboxAddress(id, port)
	to, err := url.Parse(base)
	if err != nil {
		return fmt.Errorf("address of the sandbox: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", local)
	if err != nil {
		return fmt.Errorf("--forward: %w", err)
	}
	talk := slog.New(slog.NewTextHandler(a.Stderr, nil))
	srv := &http.Server{
		Handler:           forwarder(to, header, t.HTTP.Transport, talk),
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          slog.NewLogLogger(talk.Handler(), slog.LevelWarn),
	}
	fmt.Fprintf(a.Stderr, "http://%s is port %d of sandbox %s; Ctrl-C ends this\n", l.Addr(), port, id)
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
	err := srv.Close() // a graceful shutdown would wait for streams without limit
	wg.Wait()
	if ctx.Err() != nil || errors.Is(served, http.ErrServerClosed) {
		return err
	}
	return served
}

// forwarder forwards requests with the headers that route them. The client's Host would mean another
// route, and is removed.
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
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 needs no such call
		proxy.ServeHTTP(w, r)
	})
}

// ListCommand returns `barchan ports`.
func ListCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ports SANDBOX",
		Short: "List the ports that programs in a sandbox listen on",
		Long: "List the TCP ports that programs in a sandbox listen on, with the address that each is bound to.\n" +
			"The gateway reaches all of them, those on 127.0.0.1 and ::1 too; `barchan port SANDBOX PORT` prints the URL of one.",
	}
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		return a.WithServer(ctx, func(t *app.Server) error {
			on, err := t.Running(ctx, args[0], "")
			if err != nil {
				return err
			}
			list, err := on.Client.Ports(ctx)
			if err != nil {
				return fmt.Errorf("list ports: %w", on.Lost(ctx, err))
			}
			if a.JSON {
				return a.PrintJSON(list)
			}
			printPorts(a, list)
			return nil
		})
	}
	return cmd
}

func printPorts(a *app.App, list []envd.ListeningPort) {
	if len(list) == 0 {
		fmt.Fprintln(a.Stderr, "nothing listens in the sandbox")
		return
	}
	tab := terminal.NewTable("PORT", "ADDRESS", "PID", "PROCESS")
	for _, p := range list {
		pid, name := "-", "-"
		if p.PID != 0 {
			pid, name = strconv.Itoa(p.PID), p.Process
		}
		tab.Add(strconv.Itoa(int(p.Port)), p.Address, pid, name)
	}
	tab.Write(a.Stdout)
}
