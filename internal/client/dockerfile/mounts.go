package dockerfile

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/client/template"
)

const (
	maxMounts  = 16 // the server's
	secretsDir = "/run/secrets"
)

// surround gives a command its mounts and its network.
func (t *translator) surround(step *Step, i *instructions.RunCommand) error {
	switch network := instructions.GetNetwork(i); network {
	case instructions.NetworkDefault:
	case instructions.NetworkNone:
		step.Network = template.NetworkNone
	default:
		return fmt.Errorf("--network=%s: a sandbox has a network of its own; leave it out, or use none", network)
	}
	if err := i.Expand(t.expander(step.Line)); err != nil {
		return err
	}
	mounts := instructions.GetMounts(i)
	if n := len(mounts); n > maxMounts {
		return fmt.Errorf("it has %d mounts, the maximum is %d", n, maxMounts)
	}
	for k, m := range mounts {
		if err := t.mount(step, k, m); err != nil {
			return fmt.Errorf("--mount=type=%s: %w", m.Type, err)
		}
	}
	return nil
}

func (t *translator) mount(step *Step, index int, m *instructions.Mount) error {
	out := template.Mount{Target: m.Target}
	if m.Target != "" {
		out.Target = t.absolute(m.Target)
	}
	if out.Target == "/" || (m.Target == "" && m.Type != instructions.MountTypeSecret && m.Type != instructions.MountTypeSSH) {
		return errors.New("it needs a target below the root")
	}
	var err error
	switch m.Type {
	case instructions.MountTypeCache:
		if m.From != "" || m.Source != "" {
			return errors.New("from and source are not supported yet: a cache begins empty")
		}
		out.Type, out.ID = template.MountCache, m.CacheID
		if m.CacheSharing != "" {
			out.Sharing = strings.ToUpper(string(m.CacheSharing[:1])) + string(m.CacheSharing[1:])
		}
		if m.ReadOnly {
			return errors.New("readonly is not supported yet")
		}
	case instructions.MountTypeTmpfs:
		out.Type, out.SizeBytes = template.MountTmpfs, m.SizeLimit
	case instructions.MountTypeSecret:
		err = t.mountSecret(&out, m)
	case instructions.MountTypeBind:
		err = t.bind(step, &out, index, m)
	case instructions.MountTypeSSH:
		err = errors.New("it is not supported yet; use type=secret")
	}
	out.Owner, out.Mode = ids(m.UID, m.GID), octalOf(m.Mode)
	step.Mounts = append(step.Mounts, out)
	return err
}

func (t *translator) mountSecret(out *template.Mount, m *instructions.Mount) error {
	out.Type, out.ID, out.Required = template.MountSecret, m.CacheID, m.Required
	if out.ID == "" {
		out.ID = m.Source
	}
	if out.ID == "" {
		out.ID = path.Base(m.Target)
	}
	if !barchan.ValidSecretID(out.ID) {
		return fmt.Errorf("id %q must be letters, digits, dashes, dots and underscores", out.ID)
	}
	if m.Env != nil {
		if out.Env = *m.Env; out.Env == "" {
			out.Env = out.ID
		}
		if !isIdentifier(out.Env) {
			return fmt.Errorf("env %q is no name of a variable", out.Env)
		}
		if m.Target != "" {
			return errors.New("env and target together are not supported yet; use two mounts")
		}
	}
	if out.Target == path.Join(secretsDir, out.ID) {
		out.Target = ""
	}
	if m.Required && !slices.Contains(t.opt.Secrets, out.ID) {
		return fmt.Errorf("it requires secret %q; give it by --secret id=%s,src=FILE", out.ID, out.ID)
	}
	return nil
}

func (t *translator) bind(step *Step, out *template.Mount, index int, m *instructions.Mount) (err error) {
	out.Type = template.MountBind
	if m.From != "" {
		out.Stage, err = t.stageNamed(m.From, step.Line)
		out.Source = path.Clean("/" + m.Source)
		return err
	}
	source := m.Source
	if source == "" {
		source = "."
	}
	if strings.ContainsAny(source, `*?[\`) {
		return fmt.Errorf("source %q has wildcards", source)
	}
	files, err := t.gather(&copying{SourcesAndDest: instructions.SourcesAndDest{SourcePaths: []string{source}, DestPath: "/"}})
	if err != nil {
		return err
	}
	t.bound(step, out, index, files)
	return nil
}

// bound gives a mount files of the context.
func (t *translator) bound(step *Step, out *template.Mount, index int, files *Files) {
	out.Source = files.Source
	if step.Bound == nil {
		step.Bound = map[int]*Files{}
	}
	step.Bound[index] = files
}

// ids returns the owner of a mount; empty: root.
func ids(uid, gid *uint64) string {
	if uid == nil && gid == nil {
		return ""
	}
	value := func(id *uint64) string {
		if id == nil {
			return "0"
		}
		return strconv.FormatUint(*id, 10)
	}
	return value(uid) + ":" + value(gid)
}

func octalOf(mode *uint64) string {
	if mode == nil {
		return ""
	}
	return fmt.Sprintf("%04o", *mode&0o7777)
}
