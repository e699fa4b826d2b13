// Package app is what all commands share: the settings of one run, the servers that it reaches, the names of their objects, lists, arguments and
// errors. It has no command.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/config/setting"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Environment variables of a client without a data directory. Barchan's take precedence over E2B's.
const (
	EnvAPIKey     = client.EnvAPIKey
	EnvE2BDomain  = client.EnvE2BDomain
	envKubeconfig = "BARCHAN_KUBECONFIG"
)

// Config loads the settings of the file, the environment and the flags.
func (a *App) Config(flags ...*setting.Flags) (*config.Resolved, error) {
	return config.Load(config.Options{
		File:      a.ConfigFile,
		LookupEnv: a.LookupEnv,
		Flags:     append(flags, a.RootFlags),
	})
}

// First returns the value of a flag, or else of the first variable that is not empty.
func (a *App) First(flag string, env ...string) string {
	value := flag
	for i := 0; value == "" && i < len(env); i++ {
		value, _ = a.LookupEnv(env[i])
	}
	return value
}

// givenKey returns the key of a flag or a variable, or empty. E2B's variables for the key apply only
// with those for the server: do not send a key of E2B's cloud to the local server.
func (a *App) givenKey() string {
	key := a.First(a.APIKey, EnvAPIKey)
	if key == "" && a.First("", client.EnvE2BAPIURL, EnvE2BDomain) != "" {
		key = a.First("", client.EnvE2BAPIKey, client.EnvE2BAccessToken)
	}
	return key
}

// Admin returns a client of the local server's admin socket.
func (a *App) Admin() (*adminclient.Client, error) {
	cfg, err := a.Config()
	if err != nil {
		return nil, err
	}
	return adminclient.New(cfg.AdminSocket(), cfg.DataDir), nil
}

// LocalServer returns the status of the data directory's server.
func (a *App) LocalServer(ctx context.Context) (adminclient.Status, error) {
	client, err := a.Admin()
	if err != nil {
		return adminclient.Status{}, err
	}
	s, err := client.Status(ctx)
	if err == nil && !s.Ready {
		err = fmt.Errorf("barchan is still starting (phase %q); wait until `barchan status` reports ready: %w", s.Phase, errs.ErrUnavailable)
	}
	return s, err
}

// Server is one server as its REST client sees it.
type Server struct {
	URL, key   string
	SandboxURL string // empty: derived from URL
	HTTP       *http.Client
	REST       *client.Client
}

// Key returns the key of the REST API.
func (t *Server) Key() string { return t.key }

// Server returns the server that the flags, the environment or the data directory name.
func (a *App) Server(ctx context.Context) (*Server, error) {
	t := &Server{
		URL:        a.First(a.APIURL, client.EnvAPIURL),
		key:        a.givenKey(),
		SandboxURL: a.First("", client.EnvSandboxURL),
		HTTP:       &http.Client{Transport: client.NewTransport()},
	}
	if t.URL == "" {
		if err := a.findServer(ctx, t); err != nil {
			return nil, err
		}
	}
	if t.key == "" {
		return nil, fmt.Errorf("no key for %s: set %s or --api-key: %w", t.URL, EnvAPIKey, errs.ErrInvalid)
	}
	var err error
	t.REST, err = client.New(client.Config{URL: t.URL, Key: t.key, SandboxURL: t.SandboxURL, HTTP: t.HTTP, UserAgent: "barchan/" + a.Version().Version})
	return t, err
}

// ServerWithKey is Server with a key that another program has given.
func (a *App) ServerWithKey(ctx context.Context, key string) (*Server, error) {
	other := *a
	other.APIKey = key
	return other.Server(ctx)
}

// findServer finds the server of E2B's variables, or else of the data directory.
func (a *App) findServer(ctx context.Context, t *Server) error {
	domain := a.First("", EnvE2BDomain)
	if t.URL = a.First("", client.EnvE2BAPIURL); t.URL == "" {
		s, err := a.LocalServer(ctx)
		if err == nil && (domain == "" || domain == s.Addresses.Domain) {
			t.URL = "http://" + Dialable(s.Addresses.HTTP)
			if t.key == "" {
				t.key, err = ReadKey(s.Addresses.APIKeyFile)
			}
			return err
		}
		if domain == "" {
			return forOthers(err, "set "+client.EnvAPIURL+" and "+EnvAPIKey)
		}
		t.URL = "https://api." + domain
	}
	if t.SandboxURL == "" { // it belongs to the same server
		t.SandboxURL = a.First("", client.EnvE2BSandboxURL)
	}
	return nil
}

// forOthers adds to the refusal of users other than root what they may do.
func forOthers(err error, instead string) error {
	if !errors.Is(err, errs.ErrForbidden) {
		return err
	}
	return errs.Public(err, Message(err)+", or "+instead)
}

// Dialable converts a listening address to one to connect to.
func Dialable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip, err := netip.ParseAddr(host); host == "" || (err == nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// ReadKey reads the key of the data directory.
func ReadKey(file string) (string, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrPermission) {
		return "", fmt.Errorf("%s is for root only; run this as root, or set %s: %w", file, EnvAPIKey, errs.ErrForbidden)
	}
	if err != nil {
		return "", fmt.Errorf("read the local key: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Agent returns a client of a running sandbox's agent.
func (t *Server) Agent(id, token, user string) (*envd.Client, error) {
	base, h := t.REST.SandboxAddress(id, envd.Port)
	return envd.NewClient(envd.ClientConfig{
		HTTP: t.HTTP, BaseURL: base, User: user, Header: h,
		Token: func() string { return token },
	})
}

// Running resolves a sandbox and returns a client of its agent.
func (t *Server) Running(ctx context.Context, text, user string) (*Sandbox, error) {
	d, err := t.Find(ctx, text)
	if err != nil {
		return nil, err
	}
	if d.State == client.StatePaused {
		return nil, PausedError(d.SandboxID)
	}
	client, err := t.Agent(d.SandboxID, d.AgentToken, user)
	return &Sandbox{Server: t, ID: d.SandboxID, EndAt: d.EndAt, Client: client}, err
}

// WithServer opens the server and runs a command's work.
func (a *App) WithServer(ctx context.Context, work func(t *Server) error) error {
	t, err := a.Server(ctx)
	if err != nil {
		return err
	}
	return work(t)
}

// AbsFile returns the absolute path of a file; empty stays empty.
func AbsFile(path string) string {
	if abs, err := filepath.Abs(path); err == nil && path != "" {
		return abs
	}
	return path
}

// Deps has the functions that a client cannot implement.
type Deps struct {
	// Version of this program; empty: of the build's information.
	Version string
	// RunServer runs the server: it returns once ctx is done, or after a failure.
	RunServer func(ctx context.Context, cfg config.Config, log io.Writer) error
	// RemoveAll removes what servers left of a data directory that no server
	// uses: sandboxes, network, cgroups, the directory itself. Repeating it is harmless.
	RemoveAll func(ctx context.Context, cfg config.Config, progress func(adminclient.Event)) error
	// Doctor checks whether this machine can run a server. None runs yet.
	Doctor func(ctx context.Context, cfg config.Config) []adminclient.Check
	// Audit finds leaked resources on a machine without a running server. It may return both.
	Audit func(ctx context.Context, cfg config.Config) ([]adminclient.Finding, error)
	// Journal reads the node's journal on a machine without a running server.
	Journal func(cfg *config.Config) ([]adminclient.JournalRow, error)
}

// App is one run of the program.
type App struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Deps           Deps
	LookupEnv      func(string) (string, bool)

	ConfigFile, APIURL, APIKey, Kubeconfig string
	JSON                                   bool
	Format                                 string // of lists
	RootFlags                              *setting.Flags
}

// WithAdmin opens the local server's admin socket and runs a command's work.
func (a *App) WithAdmin(work func(c *adminclient.Client) error) error {
	c, err := a.Admin()
	if err != nil {
		return err
	}
	return work(c)
}

// WithKube opens the Kubernetes API and runs a command's work.
func (a *App) WithKube(ctx context.Context, work func(k *Kube) error) error {
	k, err := a.Kube(ctx)
	if err != nil {
		return err
	}
	return work(k)
}

// outcome is what became of an argument, in JSON.
type outcome struct {
	Name  string `json:"name"` // the argument
	ID    string `json:"id,omitempty"`
	Error string `json:"error,omitempty"`
}

// Each calls do for every argument, and prints the IDs that it returns, or a list of outcomes in JSON. A failure is printed, and does not
// stop the others, except for the end of a context.
func (a *App) Each(args []string, do func(arg string) (id string, err error)) error {
	var end error
	outcomes := []outcome{}
	for _, arg := range args {
		id, err := do(arg)
		if errors.Is(err, context.Canceled) {
			end = err
			break
		}
		if err != nil {
			end = ExitCode(CodeError)
			fmt.Fprintln(a.Stderr, "barchan: "+Message(err))
			outcomes = append(outcomes, outcome{Name: arg, Error: Message(err)})
			continue
		}
		if !a.JSON {
			fmt.Fprintln(a.Stdout, id)
		}
		outcomes = append(outcomes, outcome{Name: arg, ID: id})
	}
	if a.JSON {
		end = errors.Join(end, a.PrintJSON(outcomes))
	}
	return end
}
