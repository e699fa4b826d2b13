package plan

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// DefaultPath is the PATH if the image sets none.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Environment is the image's environment with the object's changes. Address and node are the values of
// references, and values those of Secrets and ConfigMaps.
func (p *Plan) Environment(image []string, address netip.Addr, node string, values podsource.Variables) map[string]string {
	env := map[string]string{"PATH": DefaultPath}
	for _, pair := range image {
		if name, value, ok := strings.Cut(pair, "="); ok {
			env[name] = value
		}
	}
	maps.Copy(env, values.From)
	own := p.Fields(address, node)
	for i, e := range p.Env {
		switch {
		case e.ValueFrom == nil:
			env[e.Name] = expand(e.Value, env)
		case e.ValueFrom.FieldRef != nil:
			env[e.Name] = own.Field(e.ValueFrom.FieldRef.FieldPath)
		case e.ValueFrom.ResourceFieldRef != nil:
			env[e.Name] = own.Resource(e.ValueFrom.ResourceFieldRef)
		default:
			if value, ok := values.Keys[i]; ok {
				env[e.Name] = value
			}
		}
	}
	return env
}

// isRoot reports whether an image's user is root. Empty means root.
func isRoot(user string) bool {
	name, _, _ := strings.Cut(user, ":")
	return name == "" || name == "0" || name == "root"
}

// AgentConfig is the configuration of an agent that starts with a container, but for its token. sidecar is the container's name;
// empty: the first one.
func (p *Plan) AgentConfig(image ctrd.Image, env map[string]string, sidecar string) (*envd.Config, error) {
	cfg := &envd.Config{
		SandboxID: string(p.ID), TemplateID: p.Template, Entrypoint: p.Entrypoint(image.Config.Entrypoint, image.Config.Cmd, env),
		Env: env, Workdir: cmp.Or(p.Workdir, image.Config.WorkingDir), DefaultWorkdir: p.Workdir, User: cmp.Or(p.User, image.Config.User), DefaultUser: p.DefaultUser,
	}
	if p.NonRoot && isRoot(cfg.User) {
		return nil, fmt.Errorf("spec.podTemplate.spec.securityContext.runAsNonRoot: the image runs as root; name another with runAsUser: %w", errs.ErrInvalid)
	}
	if p.Class == oci.GVisor { // where the host's limit would end the sandbox
		cfg.Processes = p.Processes()
	}
	if sidecar != "" {
		cfg.Container, cfg.Restart = sidecar, p.SidecarRestart()
	}
	return cfg, nil
}

// shells are programs that images name for interactive use. Without a terminal they exit at once, so
// sandboxes do not run them.
var shells = []string{"ash", "bash", "dash", "sh", "zsh", "python", "python3", "node", "irb"}

// Entrypoint is the template's program: its own command and args, or the image's, as on Kubernetes, except an
// image's bare shell.
func (p *Plan) Entrypoint(imageEntrypoint, imageCmd []string, env map[string]string) []string {
	var argv []string
	switch {
	case len(p.Command) > 0:
		argv = append(slices.Clone(p.Command), p.Args...)
	case len(p.Args) > 0:
		argv = append(slices.Clone(imageEntrypoint), p.Args...)
	default:
		argv = append(slices.Clone(imageEntrypoint), imageCmd...)
		if len(argv) == 1 && slices.Contains(shells, path.Base(argv[0])) {
			return nil
		}
		return argv
	}
	for i := range argv {
		argv[i] = expand(argv[i], env)
	}
	return argv
}

// expand replaces $(NAME) by a variable's value, as Kubernetes does: unknown names stay, and $$ is a dollar
// sign.
func expand(text string, env map[string]string) string {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] != '$' || i+1 == len(text) {
			b.WriteByte(text[i])
			continue
		}
		switch end := strings.IndexByte(text[i:], ')'); {
		case text[i+1] == '$':
			b.WriteByte('$')
			i++
		case text[i+1] == '(' && end > 0:
			name := text[i+2 : i+end]
			if value, ok := env[name]; ok {
				b.WriteString(value)
			} else {
				b.WriteString(text[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}

// WriteSystemFiles writes SystemFiles into a sandbox's copy of the image, without following a link out of it. It also makes
// /tmp non-empty, because gVisor would mount memory over an empty one, which no checkpoint of files has.
func WriteSystemFiles(rootfs string, files map[string]string) error {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return fmt.Errorf("open root filesystem: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.MkdirAll("etc", 0o755); err != nil {
		return fmt.Errorf("write system files: %w", err)
	}
	for path, text := range files {
		name := strings.TrimPrefix(path, "/")
		// Removed first: the image may have a link here.
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("write system files: %w", err)
		}
		if err := root.WriteFile(name, []byte(text), 0o644); err != nil {
			return fmt.Errorf("write system files: %w", err)
		}
	}
	if err := root.MkdirAll("tmp/.X11-unix", 0o777); err != nil {
		return fmt.Errorf("write system files: %w", err)
	}
	for _, dir := range []string{"tmp", "tmp/.X11-unix"} {
		if err := root.Chmod(dir, 0o777|fs.ModeSticky); err != nil {
			return fmt.Errorf("write system files: %w", err)
		}
	}
	return nil
}

// SystemFiles are the files in /etc about a sandbox's network, by path. The second address is of IPv6; it may be the zero value.
func (p *Plan) SystemFiles(addr, addr6 netip.Addr, resolver string) map[string]string {
	var hosts strings.Builder
	fmt.Fprintf(&hosts, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n%s\t%s\n", addr, p.Hostname)
	if addr6.IsValid() {
		fmt.Fprintf(&hosts, "%s\t%s\n", addr6, p.Hostname)
	}
	for _, alias := range p.HostAliases {
		fmt.Fprintf(&hosts, "%s\t%s\n", alias.IP, strings.Join(alias.Hostnames, "\t"))
	}
	return map[string]string{"/etc/hosts": hosts.String(), "/etc/hostname": p.Hostname + "\n", "/etc/resolv.conf": resolver}
}

// ResolverText is a sandbox's resolv.conf; servers are the node's.
func (p *Plan) ResolverText(servers []netip.Addr) string {
	var b strings.Builder
	if p.DNSPolicy != corev1.DNSNone {
		for _, r := range servers {
			fmt.Fprintf(&b, "nameserver %s\n", r)
		}
	}
	if c := p.DNSConfig; c != nil {
		for _, r := range c.Nameservers {
			fmt.Fprintf(&b, "nameserver %s\n", r)
		}
		if len(c.Searches) > 0 {
			fmt.Fprintf(&b, "search %s\n", strings.Join(c.Searches, " "))
		}
		for _, o := range c.Options {
			if o.Value != nil {
				fmt.Fprintf(&b, "options %s:%s\n", o.Name, *o.Value)
			} else {
				fmt.Fprintf(&b, "options %s\n", o.Name)
			}
		}
	}
	return b.String()
}
