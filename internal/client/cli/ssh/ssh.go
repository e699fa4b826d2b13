// Package ssh has the commands on SSH into sandboxes: ssh, ssh-config and ssh-key. The protocol is that of the system's ssh program.
package ssh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// envPassword has the API key for AskPass.
const envPassword = "BARCHAN_SSH_PASSWORD" //nolint:gosec // the name of a variable

// hostAlias is the name of the server in lines of known_hosts.
const hostAlias = "barchan"

// AskPass answers ssh's question for a password, if this process is ssh's SSH_ASKPASS: then `barchan ssh` has started ssh.
func AskPass(args []string, lookup func(string) (string, bool), stdout io.Writer) bool {
	password, ok := lookup(envPassword)
	if !ok || len(args) != 1 || !strings.HasSuffix(args[0], "password: ") {
		return false
	}
	_, _ = fmt.Fprintln(stdout, password) // ssh reports that it got none
	return true
}

// Command returns `barchan ssh`.
func Command(a *app.App) *cobra.Command {
	var user string
	var options, local []string
	var noCommand, tty bool
	cmd := &cobra.Command{
		Use:   "ssh [flags] SANDBOX [-- COMMAND [ARG...]]",
		Short: "Open a shell in a sandbox, or run a command in it, over SSH",
		Long: "Run the system's ssh for a sandbox: it logs in by the API key, and verifies the server's host key.\n" +
			"For scp, sftp, rsync and editors, see `barchan ssh-config` and `barchan ssh-key`.",
		Example: "  barchan ssh i3k\n  barchan ssh i3k -- tail -f /var/log/syslog\n  barchan ssh -N -L 8080:localhost:80 i3k",
		Args:    app.AtLeast("SANDBOX"),
	}
	f := cmd.Flags()
	f.StringVarP(&user, "user", "u", "", "user of the sandbox (default the template's)")
	f.StringArrayVarP(&local, "local", "L", nil, "local port to forward, as PORT:localhost:PORT; may be given again")
	f.BoolVarP(&noCommand, "no-command", "N", false, "run no command, only forward ports")
	f.BoolVarP(&tty, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&options, "option", "o", nil, "option of ssh, such as ServerAliveInterval=30; may be given again")
	f.SetInterspersed(false)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		program, err := exec.LookPath("ssh")
		if err != nil {
			return fmt.Errorf("find ssh: %w; install OpenSSH's client, or use barchan exec: %w", err, errs.ErrUnavailable)
		}
		ctx := cmd.Context()
		return a.WithServer(ctx, func(t *app.Server) error {
			id, err := t.Resolve(ctx, args[0])
			if err != nil {
				return err
			}
			at, err := find(ctx, t, "")
			if err != nil {
				return err
			}
			argv := []string{
				"-F", "none", "-p", at.port, "-o", "PreferredAuthentications=password", "-o", "PubkeyAuthentication=no", "-o", "NumberOfPasswordPrompts=1",
			}
			for _, o := range append(at.options(), options...) {
				argv = append(argv, "-o", o)
			}
			for _, l := range local {
				argv = append(argv, "-L", l)
			}
			if noCommand {
				argv = append(argv, "-N")
			}
			if tty {
				argv = append(argv, "-t")
			}
			if user != "" {
				id += "+" + user
			}
			argv = append(append(argv, "-l", id, at.host), args[1:]...)
			return runSSH(ctx, a, program, argv, t.Key())
		})
	}
	return cmd
}

// runSSH runs ssh, which gets the key by AskPass.
func runSSH(ctx context.Context, a *app.App, program string, argv []string, key string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	c := exec.CommandContext(ctx, program, argv...)
	c.Env = append(os.Environ(), envPassword+"="+key, "SSH_ASKPASS="+self, "SSH_ASKPASS_REQUIRE=force")
	c.Stdin, c.Stdout, c.Stderr = a.Stdin, file(a.Stdout), file(a.Stderr)
	err = c.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		return app.ExitCode(exit.ExitCode())
	}
	return err
}

// file returns what is below an output of ours: it may be a terminal.
func file(w io.Writer) io.Writer {
	if out, ok := w.(*terminal.Output); ok {
		return out.Writer
	}
	return w
}

// access is how ssh reaches the server.
type access struct{ host, port, hostKey string }

// find asks the server; host in the place of the API's if it is not empty: HOST or HOST:PORT.
func find(ctx context.Context, t *app.Server, host string) (at access, err error) {
	answer, err := t.REST.SSH(ctx)
	if err != nil {
		return at, err
	}
	u, err := url.Parse(t.URL)
	if err != nil {
		return at, err
	}
	at = access{u.Hostname(), strconv.Itoa(answer.Port), answer.HostKey}
	if host != "" {
		if name, port, err := net.SplitHostPort(host); err == nil {
			at.host, at.port = name, port
		} else {
			at.host = host
		}
	}
	if !plainHost.MatchString(at.host) || !plainHost.MatchString(at.port) || !plainKey.MatchString(at.hostKey) {
		return at, fmt.Errorf("the address %s:%s or the host key %q of the server has characters that ssh or a shell would interpret: %w", at.host, at.port, at.hostKey, errs.ErrInvalid)
	}
	return at, nil
}

// What may be part of a command line that ssh or a shell reads.
var (
	plainHost = regexp.MustCompile(`^[A-Za-z0-9.:_][A-Za-z0-9.:_-]*$`)
	plainKey  = regexp.MustCompile(`^[a-z0-9-]+ [A-Za-z0-9+/=]+$`)
	plainPath = regexp.MustCompile(`^[A-Za-z0-9/._@+ -]+$`)
)

// options have ssh verify the host key without a file.
func (at *access) options() []string {
	return []string{
		"HostKeyAlias=" + hostAlias, `KnownHostsCommand=/bin/echo "` + hostAlias + " " + at.hostKey + `"`,
		"UserKnownHostsFile=none", "GlobalKnownHostsFile=none", "StrictHostKeyChecking=yes",
	}
}

// ConfigCommand returns `barchan ssh-config`.
func ConfigCommand(a *app.App) *cobra.Command {
	var host, suffix string
	cmd := &cobra.Command{
		Use:   "ssh-config",
		Short: "Print a block for ~/.ssh/config, with which `ssh ID.barchan` reaches sandboxes",
		Long: "Print a block for ~/.ssh/config. With it, ssh, scp, sftp, rsync and editors reach a sandbox by\n" +
			"ID.barchan, or USER@ID.barchan for another user than the template's. They log in by the keys that\n" +
			"`barchan ssh-key add` has registered.",
		Example: "  barchan ssh-config >>~/.ssh/config\n  barchan ssh-key add ~/.ssh/id_ed25519.pub\n  scp file i3k….barchan:",
	}
	cmd.Flags().StringVar(&host, "host", "", "HOST or HOST:PORT of the SSH server (default the API's host, and the server's port)")
	cmd.Flags().StringVar(&suffix, "suffix", ".barchan", "end of the names; give each server its own")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !strings.HasPrefix(suffix, ".") || len(suffix) < 2 || strings.ContainsAny(suffix, " \t\n*?!\"'%") {
			return app.Usage(cmd, fmt.Errorf("--suffix: %q is not the end of a name, such as .barchan", suffix))
		}
		ctx := cmd.Context()
		return a.WithServer(ctx, func(t *app.Server) error {
			at, err := find(ctx, t, host)
			if err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			if !plainPath.MatchString(self) {
				return fmt.Errorf("the path of this program, %s, has characters that a shell would interpret; move it: %w", self, errs.ErrInvalid)
			}
			lines := []string{
				"Host *" + suffix, fmt.Sprintf(`    ProxyCommand "%s" ssh-proxy %s %%h`, self, net.JoinHostPort(at.host, at.port)),
				"    User " + sandbox.SSHDefaultUser,
			}
			for _, o := range at.options() {
				name, value, _ := strings.Cut(o, "=")
				lines = append(lines, "    "+name+" "+value)
			}
			fmt.Fprintln(a.Stdout, strings.Join(lines, "\n"))
			return nil
		})
	}
	return cmd
}

// ProxyCommand returns `barchan ssh-proxy`, for ssh's ProxyCommand.
func ProxyCommand(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use:    "ssh-proxy ADDRESS NAME",
		Short:  "Connect ssh to a sandbox; ssh runs it, see ssh-config",
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			id, _, _ := strings.Cut(args[1], ".")
			if _, err := sandbox.ParseID(id); err != nil {
				return app.Usage(cmd, fmt.Errorf("NAME: %q does not begin with the ID of a sandbox", args[1]))
			}
			nc, err := (&net.Dialer{}).DialContext(cmd.Context(), "tcp", args[0])
			if err != nil {
				return fmt.Errorf("reach the SSH server: %w: %w", err, errs.ErrUnavailable)
			}
			defer func() { _ = nc.Close() }()
			defer context.AfterFunc(cmd.Context(), func() { _ = nc.Close() })()
			if _, err := io.WriteString(nc, sandbox.SSHPreface+id+"\r\n"); err != nil {
				return err
			}
			go func() { // ends with the process
				_, _ = io.Copy(nc, a.Stdin)
				_ = nc.(*net.TCPConn).CloseWrite()
			}()
			if _, err = io.Copy(a.Stdout, nc); cmd.Context().Err() != nil {
				return nil // ssh has ended, and ends this program
			}
			return err
		},
	}
}
