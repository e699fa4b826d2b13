// Package baseimage builds images of sandboxes: Debian with a user, Python, compilers and git, assembled on this
// host from the distribution's packages, and Node.js from the npm registry, so that no image registry is needed.
// The default is the base image; other images add packages and files. It does not import the image, and never
// runs anything from it.
//
// An image is an OCI layout in a tar, named by a hash of its inputs: a second Build with the same inputs finds
// the first one's file.
package baseimage

import (
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Defaults of a Config.
const (
	DefaultRef   = "barchan.local/base:latest"
	DefaultSuite = "bookworm"
	defaultName  = "base"
	defaultCache = "/var/cache/barchan"
)

// EnvCache names the environment variable with the directory for rebuildable files; images are in its folder
// "images".
const EnvCache = "BARCHAN_CACHE"

//go:embed customize.sh
var customize []byte

var (
	packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+$`)
	suiteName   = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
)

// DefaultPackages returns the packages beyond Debian's essential ones.
func DefaultPackages() []string {
	return []string{
		"bash", "build-essential", "ca-certificates", "coreutils", "curl", "git", "iproute2", "less",
		"ncurses-bin", "procps", "python3", "python3-dev", "python3-pip", "python3-venv", "sudo", "xz-utils",
	}
}

// Config configures a build. Its zero value is the default image.
type Config struct {
	// Dir is the directory of images; empty is $BARCHAN_CACHE/images, or /var/cache/barchan/images without
	// the variable.
	Dir string
	// Name is the image's name in commands, messages and file names; empty is "base".
	Name string
	// Ref is the name in the image's index.
	Ref string
	// Suite is Debian's code name of the release to install.
	Suite string
	// Packages are installed; empty is DefaultPackages.
	Packages []string
	// Files are added to the root file system once packages are installed, as root's; nil adds none.
	Files fs.FS
	// Sources are lines as in sources.list; empty is this host's own on a Debian host, otherwise mmdebstrap's
	// default for the suite.
	Sources []string
	// Mmdebstrap is the program that installs packages; empty is found in PATH.
	Mmdebstrap string
	// Npm is the program that fetches Node.js; empty is found in PATH.
	Npm string
	// Epoch is the modification time of the build's own files. Zero is the variable SOURCE_DATE_EPOCH, or
	// today's midnight, UTC.
	Epoch time.Time
	// Rebuild ignores an existing image of the same inputs, to include the distribution's updates.
	Rebuild bool

	filesHash  string // of Files; empty without
	debianNode bool   // Node.js is Debian's, because the npm registry is unreachable
}

// Result is an image on disk.
type Result struct {
	Path   string        `json:"path"`   // the tar
	Ref    string        `json:"ref"`    // its name
	Inputs string        `json:"inputs"` // the hash of its inputs
	Digest string        `json:"digest"` // of the manifest: sha256:…
	Size   int64         `json:"size"`   // of the tar, in bytes
	Cached bool          `json:"cached"` // an existing image
	Took   time.Duration `json:"took"`
	// Warning describes a deficiency; it is mostly empty.
	Warning string `json:"warning,omitempty"`
}

// Progress is the progress of a build. Percent never decreases.
type Progress struct {
	Step    string `json:"step"`
	Percent int    `json:"percent"`
	Bytes   int64  `json:"bytes,omitempty"` // written in this step, where bytes are written
}

// Build returns the image of cfg, and builds it if there is none. Calls of progress are serialized; it may be
// nil. Only root can build. A cancelled or failed build leaves nothing. Builds into one directory wait for
// each other.
func Build(ctx context.Context, cfg Config, progress func(Progress)) (Result, error) {
	start := time.Now()
	if err := cfg.complete(ctx); err != nil {
		return Result{}, err
	}
	report := &reporter{fn: progress}
	if !cfg.Rebuild {
		if res, ok := cfg.find(); ok {
			res.Took = time.Since(start)
			report.step("use the image of an earlier build", 100)
			return res, nil
		}
	}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return Result{}, fmt.Errorf("create image directory: %w", err)
	}
	unlock, err := lockDir(ctx, cfg.Dir, func() { report.step("wait for another build", 0) })
	if err != nil {
		return Result{}, fmt.Errorf("lock image directory %s: %w", cfg.Dir, err)
	}
	defer unlock()
	if !cfg.Rebuild { // another build may have completed
		if res, ok := cfg.find(); ok {
			res.Took = time.Since(start)
			report.step("use the image of another build", 100)
			return res, nil
		}
	}
	built, warning, err := cfg.build(ctx, report)
	if err != nil {
		return Result{}, fmt.Errorf("build image %s: %w", cfg.Name, err)
	}
	res, ok := cfg.find()
	if !ok {
		return Result{}, fmt.Errorf("build image %s: %s cannot be read back", cfg.Name, cfg.path())
	}
	res.Cached, res.Took, res.Warning = !built, time.Since(start), warning
	report.step("done", 100)
	return res, nil
}

// complete sets the defaults and validates the rest.
func (c *Config) complete(ctx context.Context) error {
	if c.Dir == "" {
		c.Dir = filepath.Join(cmp.Or(os.Getenv(EnvCache), defaultCache), "images")
	}
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return fmt.Errorf("image directory: %w", err)
	}
	c.Dir = dir
	c.Name, c.Ref = cmp.Or(c.Name, defaultName), cmp.Or(c.Ref, DefaultRef)
	if !packageName.MatchString(c.Name) {
		return invalid("image name %q: use lower-case letters, digits and dashes, such as %s", c.Name, defaultName)
	}
	if _, err := name.NewTag(c.Ref, name.StrictValidation); err != nil {
		return invalid("image reference %q: use registry/name:tag, such as %s", c.Ref, DefaultRef)
	}
	c.Suite = cmp.Or(c.Suite, DefaultSuite)
	if !suiteName.MatchString(c.Suite) {
		return invalid("suite %q: use a code name of Debian, such as %s", c.Suite, DefaultSuite)
	}
	if len(c.Packages) == 0 {
		c.Packages = DefaultPackages()
	}
	c.Packages = slices.Clone(c.Packages)
	slices.Sort(c.Packages)
	c.Packages = slices.Compact(c.Packages)
	for _, p := range c.Packages {
		if !packageName.MatchString(p) {
			return invalid("package %q: use the name of a Debian package", p)
		}
	}
	if c.Files != nil {
		if c.filesHash, err = hashFiles(c.Files); err != nil {
			return fmt.Errorf("read the image's own files: %w", err)
		}
	}
	if len(c.Sources) == 0 {
		c.Sources, err = hostSources(ctx, "/", c.Suite)
		if err != nil {
			return fmt.Errorf("read this host's package sources: %w", err)
		}
	}
	for _, s := range c.Sources {
		if !isSource(s) {
			return invalid("package source %q: use a line as in sources.list, such as %q", s, "deb http://mirror.example/debian "+c.Suite+" main")
		}
	}
	return nil
}

func invalid(format string, args ...any) error {
	message := fmt.Sprintf(format, args...)
	return errs.Public(errs.ErrInvalid, message)
}

// inputs hashes everything that determines the image, except the state of the distribution's archive.
func (c *Config) inputs() string {
	canonical, err := json.Marshal(struct {
		Arch, Ref, Suite           string
		Packages, Sources, Options []string
		Customize                  []byte
		Env, Node                  []string
		Files                      string `json:",omitempty"`
	}{runtime.GOARCH, c.Ref, c.Suite, c.Packages, c.Sources, dpkgOptions(), customize, imageEnv(), c.node(), c.filesHash})
	if err != nil {
		panic(err) // strings and bytes always marshal
	}
	sum := sha256.Sum256(canonical)
	return hex.EncodeToString(sum[:])
}

// hashFiles hashes the paths and contents of files.
func hashFiles(files fs.FS) (string, error) {
	sum := sha256.New()
	err := fs.WalkDir(files, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := fs.ReadFile(files, path)
		if err != nil {
			return err
		}
		fmt.Fprintf(sum, "%q %d ", path, len(data))
		_, err = sum.Write(data)
		return err
	})
	return hex.EncodeToString(sum.Sum(nil)), err
}

// node identifies the Node.js in the image.
func (c *Config) node() (specs []string) {
	if c.debianNode {
		return debianNode()
	}
	for _, p := range nodePackages() {
		specs = append(specs, p.spec(), p.integrity)
	}
	return specs
}

func (c *Config) path() string {
	return filepath.Join(c.Dir, c.Name+"-"+c.inputs()[:16]+".tar")
}

// find returns the finished image of these inputs, if its file is intact.
func (c *Config) find() (Result, bool) {
	path := c.path()
	digest, size, err := readDigest(path)
	if err != nil {
		return Result{}, false
	}
	return Result{
		Path: path, Ref: c.Ref, Inputs: c.inputs(), Digest: digest, Size: size, Cached: true,
	}, true
}
