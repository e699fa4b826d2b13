package envd

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// ConfigPath is where the agent reads its Config.
const ConfigPath = "/.barchan/config.json"

// Config is what the agent needs at its start. The node writes
// it before the sandbox starts. The zero value is an agent without a program
// of its own.
type Config struct {
	SandboxID  string `json:"sandboxID,omitempty"`
	TemplateID string `json:"templateID,omitempty"`
	// Entrypoint is the template's program with its arguments; none is fine.
	Entrypoint []string `json:"entrypoint,omitempty"`
	// Env is the environment of the entrypoint and of every process.
	Env map[string]string `json:"env,omitempty"`
	// Workdir is where the entrypoint runs; empty means /.
	Workdir string `json:"workdir,omitempty"`
	// User runs the entrypoint: name or ID, with ":group" if wanted. Empty means root.
	User string `json:"user,omitempty"`
	// DefaultUser runs requests that name no user; empty means DefaultUser
	// if the image has that user, else root.
	DefaultUser string `json:"defaultUser,omitempty"`
	// DefaultWorkdir is where requests start; empty means Workdir, then the user's home.
	DefaultWorkdir string `json:"defaultWorkdir,omitempty"`
	// ListenAddress is an IP address; empty means all of them.
	ListenAddress string `json:"listenAddress,omitempty"`
	// Port zero means Port.
	Port int `json:"port,omitempty"`
	// Container names a container beside the first of a sandbox, whose agent listens on ContainerSocket and on no port.
	Container string `json:"container,omitempty"`
	// Restart starts the entrypoint again after its end: RestartAlways, or RestartOnFailure. Empty: it ends once.
	Restart string `json:"restart,omitempty"`
	// Hostname and Hosts, if given, are set at the start.
	Hostname string      `json:"hostname,omitempty"`
	Hosts    []HostEntry `json:"hosts,omitempty"`
	// StdoutPath and StderrPath are files that also get the entrypoint's output.
	StdoutPath string `json:"stdoutPath,omitempty"`
	StderrPath string `json:"stderrPath,omitempty"`
	// AccessToken guards the agent from its first instant. Without one, an agent that is not Open
	// refuses all requests that need the token, until InitRequest brings one.
	AccessToken string `json:"accessToken,omitempty"`
	// AccessTokenSHA256 guards an agent whose configuration others may read, as in the spec of a Pod: it is
	// the SHA-256 of the token, in hex. The agent knows the token once an InitRequest brought it; until then
	// it verifies no signature. It excludes AccessToken. An Open agent uses it only to prove its identity.
	AccessTokenSHA256 string `json:"accessTokenSHA256,omitempty"`
	// Open disables the token check. It excludes AccessToken.
	Open bool `json:"open,omitempty"`
	// SystemFiles are files' contents by path, of those in SystemPaths. The node has written them
	// before a sandbox starts; an agent writes them when its sandbox was restored from a
	// checkpoint, whose kernel may remember what was in them.
	SystemFiles map[string]string `json:"systemFiles,omitempty"`
	// Processes bounds the processes and threads that each user has in the sandbox; programs of
	// root get a few less, so that the agent has some left. Zero means no bound of the agent's.
	Processes int `json:"processes,omitempty"`
	// PortFile, if given, receives the address in use, so that a Port of -1
	// can mean any free one.
	PortFile string `json:"portFile,omitempty"`
}

// SystemPaths are the paths that Config.SystemFiles may have.
func SystemPaths() []string {
	return []string{"/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/etc/machine-id"}
}

// HostEntry is a line of /etc/hosts.
type HostEntry struct {
	IP    string   `json:"ip"`
	Names []string `json:"names"`
}

// Validate names the first field that cannot be right.
func (c *Config) Validate() error {
	if err := c.checkAccess(); err != nil {
		return err
	}
	if err := c.checkPort(); err != nil {
		return err
	}
	switch {
	case !slices.Contains([]string{"", RestartAlways, RestartOnFailure}, c.Restart):
		return fmt.Errorf("restart: %q is neither %s nor %s", c.Restart, RestartAlways, RestartOnFailure)
	case c.Processes < 0:
		return fmt.Errorf("processes: %d is negative", c.Processes)
	case len(c.Entrypoint) > 0 && c.Entrypoint[0] == "":
		return fmt.Errorf("entrypoint: the program's name is empty")
	case c.Workdir != "" && !filepath.IsAbs(c.Workdir):
		return fmt.Errorf("workdir: %q is not an absolute path", c.Workdir)
	case c.DefaultWorkdir != "" && !filepath.IsAbs(c.DefaultWorkdir):
		return fmt.Errorf("defaultWorkdir: %q is not an absolute path", c.DefaultWorkdir)
	}
	for path := range c.SystemFiles {
		if !slices.Contains(SystemPaths(), path) {
			return fmt.Errorf("systemFiles: %q is none of %s", path, strings.Join(SystemPaths(), ", "))
		}
	}
	return c.checkEnv()
}

func (c *Config) checkPort() error {
	switch {
	case c.Port < -1 || c.Port > 65535:
		return fmt.Errorf("port: %d is not between 1 and 65535", c.Port)
	case c.Port == -1 && c.PortFile == "":
		return fmt.Errorf("portFile: needed with port -1")
	case c.Container != "" && (c.Port != 0 || c.PortFile != ""):
		return fmt.Errorf("container: cannot come with a port")
	}
	return nil
}

func (c *Config) checkAccess() error {
	if c.Open && c.AccessToken != "" {
		return fmt.Errorf("open: cannot come with an accessToken")
	}
	if c.AccessTokenSHA256 == "" {
		return nil
	}
	if c.AccessToken != "" {
		return fmt.Errorf("accessTokenSHA256: cannot come with an accessToken")
	}
	if sum, err := hex.DecodeString(c.AccessTokenSHA256); err != nil || len(sum) != sha256.Size {
		return fmt.Errorf("accessTokenSHA256: is not a SHA-256 in hex")
	}
	return nil
}

func (c *Config) checkEnv() error {
	for k, v := range c.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return fmt.Errorf("env: %q is not a name of a variable, or its value has a zero byte", k)
		}
	}
	return nil
}

// ReadConfig reads and validates a Config. Unknown fields are an error, so
// that an old agent never half obeys a newer node.
func ReadConfig(file string) (*Config, error) { return readConfig(file, true) }

// RereadConfig is ReadConfig for an agent that runs already and was restored from a checkpoint. It
// may be older than the node, and a partial new
// configuration is better than the old one: unknown fields are ignored.
func RereadConfig(file string) (*Config, error) { return readConfig(file, false) }

func readConfig(file string, strict bool) (*Config, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("open config: %w", err)
	}
	defer func() { _ = f.Close() }()
	c, err := decodeConfig(io.LimitReader(f, 16<<20), strict)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", file, err)
	}
	return c, nil
}

// ParseConfig is ReadConfig for JSON text.
func ParseConfig(text string) (*Config, error) {
	c, err := decodeConfig(strings.NewReader(text), true)
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	return c, nil
}

func decodeConfig(from io.Reader, strict bool) (*Config, error) {
	dec := json.NewDecoder(from)
	if strict {
		dec.DisallowUnknownFields()
	}
	var c Config
	if err := dec.Decode(&c); err != nil {
		return nil, fmt.Errorf("decode config: %w", err)
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &c, nil
}

// TokenSHA256 returns Config.AccessTokenSHA256 of a token.
func TokenSHA256(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// WriteConfig validates a Config and puts it at file, which only root may read,
// for it may hold a token.
func WriteConfig(file string, c *Config) error {
	if err := c.Validate(); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	b, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encode config: %w", err)
	}
	tmp := file + ".tmp"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("write config: %w", err)
	}
	if err := os.Rename(tmp, file); err != nil {
		return fmt.Errorf("place config: %w", err)
	}
	return nil
}
