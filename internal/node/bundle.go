package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// defaultPath is where programs are looked for if the image does not say.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// installAgent puts a copy of the agent where sandboxes can have a hard link to it: one that
// runs keeps its own, whatever a later version of ours brings.
func (n *Node) installAgent() error {
	from, err := os.Open(n.cfg.AgentBinary)
	if err != nil {
		return fmt.Errorf("install agent: %w", err)
	}
	defer func() { _ = from.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, from); err != nil {
		return fmt.Errorf("install agent: %w", err)
	}
	n.agentFile = filepath.Join(n.cfg.DataDir, "agents", hex.EncodeToString(sum.Sum(nil)[:16]))
	if _, err := os.Stat(n.agentFile); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(n.agentFile), 0o755); err != nil {
		return fmt.Errorf("install agent: %w", err)
	}
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("install agent: %w", err)
	}
	if err := copyFile(from, n.agentFile); err != nil {
		return fmt.Errorf("install agent: %w", err)
	}
	return nil
}

// copyFile writes a program in full or not at all.
func copyFile(from io.Reader, to string) error {
	tmp, err := os.CreateTemp(filepath.Dir(to), ".new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = io.Copy(tmp, from)
	if err = errors.Join(err, tmp.Chmod(0o755), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), to)
}

func (n *Node) claimsDir(id string) string { return filepath.Join(n.cfg.DataDir, "claims", id) }

// writeBundle writes all files that the container starts from.
func (w *operation) writeBundle(ctx context.Context) error {
	p := &w.row.Plan
	agentDir := w.path("agent")
	if err := os.MkdirAll(agentDir, 0o755); err != nil {
		return unavailable(fmt.Errorf("make agent's directory: %w", err))
	}
	link := filepath.Join(agentDir, path.Base(oci.AgentPath))
	if err := os.Link(w.agentProgram(), link); err != nil && !errors.Is(err, fs.ErrExist) {
		return unavailable(fmt.Errorf("link agent: %w", err))
	}
	cfg, err := w.agentConfig()
	if err != nil {
		return err
	}
	w.row.Program = len(cfg.Entrypoint) > 0
	if w.restoresMemory() { // the kernel in the memory knows the files as they were: its agent writes them
		cfg.SystemFiles = systemFiles(p, w.row.Address, w.n.beside(w.row.Address), w.n.resolverText(p))
	} else if err := writeSystemFiles(w.path("rootfs"), p, w.row.Address, w.n.beside(w.row.Address), w.n.resolverText(p)); err != nil {
		return unavailable(err)
	}
	if err := envd.WriteConfig(filepath.Join(agentDir, path.Base(envd.ConfigPath)), cfg); err != nil {
		return fmt.Errorf("agent's configuration: %w: %w", err, errs.ErrInvalid)
	}
	if err := w.fillVolumes(ctx); err != nil {
		return err
	}
	mounts, err := w.mounts()
	if err != nil {
		return unavailable(err)
	}
	return unavailable(oci.WriteBundle(w.n.dir(w.id()), oci.Spec(oci.Sandbox{
		Class: p.Class, Hostname: p.Hostname, Rootfs: w.path("rootfs"), NetnsPath: w.netns, AgentDir: agentDir,
		CgroupsPath: w.n.cgroup(w.id()), Env: []string{"PATH=" + defaultPath}, Mounts: mounts, Limits: p.Limits, Security: p.Security,
	})))
}

// mounts are the volumes, with their directories made.
func (w *operation) mounts() (mounts []oci.Mount, err error) {
	for _, v := range w.row.Plan.Volumes {
		m := oci.Mount{Target: v.Target, ReadOnly: v.ReadOnly, SizeLimit: v.SizeLimit}
		switch {
		case v.Claim != "":
			m.Source, err = volumeDir(filepath.Join(w.n.claimsDir(w.id()), v.Claim), v.SubPath)
		case v.Scratch != "":
			m.Source, err = volumeDir(w.path(filepath.Join("volumes", v.Scratch)), v.SubPath)
		}
		if err != nil {
			return nil, err
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

// volumeDir makes a volume's directory and the path in it that is asked for, which must not
// lead out of it by a link that a sandbox left there.
func volumeDir(dir, sub string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make volume: %w", err)
	}
	if err := os.Chmod(dir, 0o777); err != nil { // the sandbox's users share it
		return "", fmt.Errorf("make volume: %w", err)
	}
	if sub == "" {
		return dir, nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", fmt.Errorf("open volume: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.MkdirAll(sub, 0o777); err != nil {
		return "", fmt.Errorf("make path %q of volume: %w", sub, err)
	}
	full, err := filepath.EvalSymlinks(filepath.Join(dir, sub))
	if err != nil {
		return "", fmt.Errorf("resolve path %q of volume: %w", sub, err)
	}
	return full, nil
}

// agentConfig is what the agent must know from its first instant.
func (w *operation) agentConfig() (*envd.Config, error) {
	p := &w.row.Plan
	env := w.environment()
	cfg := &envd.Config{
		SandboxID: w.id(), TemplateID: p.Template, Entrypoint: entrypoint(p, w.image.Config.Entrypoint, w.image.Config.Cmd, env),
		Env: env, Workdir: p.Workdir, DefaultWorkdir: p.Workdir, User: p.User, DefaultUser: "",
	}
	if cfg.Workdir == "" {
		cfg.Workdir = w.image.Config.WorkingDir
	}
	if cfg.User == "" {
		cfg.User = w.image.Config.User
	}
	if p.NonRoot && isRoot(cfg.User) {
		return nil, fmt.Errorf("spec.podTemplate.spec.securityContext.runAsNonRoot: the image runs as root; name another with runAsUser: %w", errs.ErrInvalid)
	}
	if p.Class == oci.GVisor { // where the machine's limit would end the sandbox
		cfg.Processes = p.processes()
	}
	w.guardAgent(cfg)
	return cfg, nil
}

// environment is the image's, changed by the object's, whenever that was read.
func (w *operation) environment() map[string]string {
	env := map[string]string{"PATH": defaultPath}
	for _, pair := range w.row.ImageEnv {
		if name, value, ok := strings.Cut(pair, "="); ok {
			env[name] = value
		}
	}
	for _, e := range w.row.Plan.Env {
		value := expand(e.Value, env)
		if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
			value = w.reference(e.ValueFrom.FieldRef.FieldPath)
		}
		env[e.Name] = value
	}
	return env
}

func isRoot(user string) bool {
	name, _, _ := strings.Cut(user, ":")
	return name == "" || name == "0" || name == "root"
}

func (w *operation) reference(path string) string {
	switch path {
	case "metadata.name":
		return w.row.Plan.Ref.Name
	case "metadata.namespace":
		return w.row.Plan.Ref.Namespace
	case "metadata.uid":
		return w.uid()
	case "spec.nodeName":
		return w.n.cfg.Name
	default: // status.podIP; the specification was checked
		return w.row.Address.String()
	}
}

// shells are programs that images name so that a person at a terminal gets a prompt. Without
// a terminal they end at once; a sandbox is better off without them.
var shells = []string{"ash", "bash", "dash", "sh", "zsh", "python", "python3", "node", "irb"}

// entrypoint is the template's program: its own command and args, or what the image says, as
// on Kubernetes, but for an image's bare shell.
func entrypoint(p *plan, imageEntrypoint, imageCmd []string, env map[string]string) []string {
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

// expand replaces $(NAME) by a variable's value, as Kubernetes does: unknown names stay as
// they are, and $$ is a dollar sign.
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

// writeSystemFiles writes what a sandbox finds in /etc about its place in the network into
// its own copy of the image, never following a link out of it. It also keeps /tmp from being
// empty, because gVisor would put memory over an empty one, which no checkpoint of files has.
//
// The second address is of IPv6; it may be the zero value.
func writeSystemFiles(rootfs string, p *plan, addr, addr6 netip.Addr, resolver string) error {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return fmt.Errorf("open root filesystem: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.MkdirAll("etc", 0o755); err != nil {
		return fmt.Errorf("write system files: %w", err)
	}
	for path, text := range systemFiles(p, addr, addr6, resolver) {
		name := strings.TrimPrefix(path, "/")
		// Removed first: it may be a link, and to where is the image's affair.
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

// systemFiles are the contents of what writeSystemFiles writes about a place in the network, by path.
func systemFiles(p *plan, addr, addr6 netip.Addr, resolver string) map[string]string {
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

// resolverText is a sandbox's resolv.conf.
func (n *Node) resolverText(p *plan) string {
	var b strings.Builder
	if p.DNSPolicy != corev1.DNSNone {
		for _, r := range n.sandboxResolvers() {
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
