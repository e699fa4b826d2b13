package layers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
)

const (
	// secretsDir has the secrets of a step, in memory, and boundDir the files that are mounted by themselves.
	secretsDir = "/run/secrets"
	boundDir   = "/run/barchan"

	cacheMode  = "0755"
	secretMode = "0400"
	rootOwner  = "0:0"
)

// Scripts around a command with mounts.
const (
	// ownScript gives a directory or a file to its owner.
	ownScript = `set -e; chown -- "$1" "$3"; chmod -- "$2" "$3"`
	// linkScript has a path lead to a file that is elsewhere.
	linkScript = `set -e
if [ -e "$2" ] || [ -L "$2" ]; then echo "$2 exists, so that no file can be mounted there" >&2; exit 1; fi
mkdir -p -- "$(dirname -- "$2")"; ln -s -- "$1" "$2"`
	// unlinkScript removes such links.
	unlinkScript = `for link; do if [ -L "$link" ]; then rm -f -- "$link"; fi; done`
)

// inputs are what the sandbox of a layer gets besides the files below it.
type inputs struct {
	blueprint *agents.SandboxBlueprint
	policies  *agents.BarchanSpec
	// files is the archive of a Copy.
	files  string
	mounts []mount
	// release ends the use of locked caches.
	release func()
}

// mount is a mount of a Run.
type mount struct {
	barchan.BuildMount
	// archive has the files of a Bind, or of a Cache that is kept.
	archive string
	// dir is where its volume is, and file the name of a single file in it.
	dir, file string
}

// inputs finds what a layer needs, and has stages make it.
func (w *Work) inputs(ctx context.Context, l *layer) (in *inputs, err error) {
	in = &inputs{release: func() {}}
	defer func() {
		if err != nil {
			in.release()
		}
	}()
	var step *barchan.BuildStep
	if n := len(l.steps); n > 0 {
		step = &l.steps[n-1] // the one that ends the layer
		w.Log.Step = w.stepNumber(l.first + n - 1)
	}
	if step != nil && step.Type == barchan.StepCopy {
		if in.files = step.FilesHash; step.From != nil {
			if in.files, err = w.stageFiles(ctx, step.From, sourcesOf(step)); err != nil {
				return in, err
			}
		}
	}
	in.blueprint, in.policies = w.limited(), w.base.policies
	if step == nil || step.Type != barchan.StepRun {
		return in, nil
	}
	if step.Network == barchan.NetworkNone {
		in.policies = w.offline()
	}
	for i := range step.Mounts {
		m, err := w.newMount(ctx, &step.Mounts[i], i)
		if err != nil {
			return in, err
		}
		in.mounts = append(in.mounts, m)
	}
	addVolumes(in.blueprint, in.mounts)
	in.release, err = w.lockCaches(ctx, in.mounts)
	return in, err
}

// offline returns the policies of a sandbox that reaches nothing.
func (w *Work) offline() *agents.BarchanSpec {
	p := w.base.policies.DeepCopy()
	if p == nil {
		p = &agents.BarchanSpec{}
	}
	p.Network = &agents.EgressPolicy{Internet: new(bool)}
	return p
}

func (w *Work) newMount(ctx context.Context, spec *barchan.BuildMount, i int) (m mount, err error) {
	m = mount{BuildMount: *spec, dir: path.Clean(spec.Target)}
	switch spec.Type {
	case barchan.MountCache:
		m.ID = cmp.Or(spec.ID, m.dir)
		m.archive = longHashOf("cache", m.ID)
	case barchan.MountBind:
		if m.archive = spec.FilesHash; spec.Stage != "" {
			m.archive, err = w.stageFiles(ctx, &barchan.StageFiles{Stage: spec.Stage}, []string{rooted(spec.Source)})
		}
		if err == nil {
			m.file, err = w.boundFile(&m)
		}
		if m.file != "" {
			m.dir = path.Join(boundDir, strconv.Itoa(i))
		}
	case barchan.MountSecret:
		if m.dir, m.file = secretsDir, spec.ID; spec.Env != "" {
			m.dir = ""
		}
	case barchan.MountTmpfs:
	}
	return m, err
}

// boundFile returns the name of a Bind's file, if it is one. An uploaded archive has it by its path, before all others.
func (w *Work) boundFile(m *mount) (string, error) {
	file, err := w.onlyFile(m.archive)
	if err != nil || m.Stage != "" {
		return file, err
	}
	if m.Source == "" || path.Clean(m.Source) != file {
		return "", nil
	}
	return path.Base(file), nil
}

// addVolumes gives a sandbox the volumes of mounts. They are no part of its files.
func addVolumes(b *agents.SandboxBlueprint, mounts []mount) {
	spec := &b.PodTemplate.Spec
	used := map[string]bool{}
	var names []string
	for i, m := range mounts {
		if m.dir == "" || used[m.dir] {
			continue
		}
		used[m.dir] = true
		volume := corev1.Volume{Name: "build-mount-" + strconv.Itoa(i)}
		volume.EmptyDir = &corev1.EmptyDirVolumeSource{}
		if m.Type == barchan.MountTmpfs || m.Type == barchan.MountSecret {
			volume.EmptyDir.Medium = corev1.StorageMediumMemory
		}
		if m.SizeBytes > 0 {
			volume.EmptyDir.SizeLimit = resource.NewQuantity(m.SizeBytes, resource.BinarySI)
		}
		names = append(names, volume.Name)
		spec.Volumes = append(spec.Volumes, volume)
		spec.Containers[0].VolumeMounts = append(spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: volume.Name, MountPath: m.dir})
	}
	if len(names) > 0 {
		if b.PodTemplate.ObjectMeta.Annotations == nil {
			b.PodTemplate.ObjectMeta.Annotations = map[string]string{}
		}
		b.PodTemplate.ObjectMeta.Annotations[agents.AnnotationTransientVolumes] = strings.Join(names, ",")
	}
}

// lockCaches waits until no other step of the namespace uses a cache that is locked.
func (w *Work) lockCaches(ctx context.Context, mounts []mount) (release func(), err error) {
	var ids []string
	for _, m := range mounts {
		if m.Type == barchan.MountCache && m.Sharing == barchan.SharingLocked {
			ids = append(ids, w.Build.Namespace+"/"+m.ID)
		}
	}
	slices.Sort(ids) // so that two steps cannot wait for each other
	var held []func()
	release = func() {
		for _, free := range held {
			free()
		}
	}
	for _, id := range slices.Compact(ids) {
		_, free, err := w.r.caches.Acquire(ctx, id, false)
		if err != nil {
			release()
			return func() {}, err
		}
		held = append(held, free)
	}
	return release, nil
}

// runMounted runs the command of a step among its mounts.
func (w *Work) runMounted(ctx context.Context, s *started, user string, step *barchan.BuildStep, in *inputs) error {
	env, links := map[string]string{}, []string(nil)
	for i := range in.mounts {
		m := &in.mounts[i]
		link, err := w.fill(ctx, s, m, env)
		if err != nil {
			return err
		}
		if link != "" {
			links = append(links, link)
		}
	}
	if err := w.command(ctx, s, user, step.Args[0], env); err != nil {
		return err
	}
	if len(links) > 0 {
		if err := w.script(ctx, s, "remove links to mounts", unlinkScript, links...); err != nil {
			return err
		}
	}
	for i := range in.mounts {
		if m := &in.mounts[i]; m.Type == barchan.MountCache {
			w.keepCache(ctx, s, m)
		}
	}
	return nil
}

// fill puts its content into a mount, and returns the link that leads to it, if there is one.
func (w *Work) fill(ctx context.Context, s *started, m *mount, env map[string]string) (link string, err error) {
	switch m.Type {
	case barchan.MountCache:
		if w.r.Store.HasFiles(w.Build.Namespace, m.archive) {
			err := w.unpack(ctx, s, fmt.Sprintf("fill cache '%s'", m.ID), m.archive, ".", m.dir+"/", "", "")
			if f, is := errors.AsType[*buildlog.Failure](err); is && ctx.Err() == nil { // such as an image without tar
				w.Log.Say(builds.LevelWarn, "%s; it is empty", f.Message)
			} else if err != nil {
				return "", err
			}
		}
		return "", w.own(ctx, s, m, cacheMode, m.dir)
	case barchan.MountBind:
		source := cmp.Or(strings.TrimPrefix(m.Source, "/"), ".")
		if m.Stage != "" {
			source = cmp.Or(m.file, ".")
		}
		if err := w.unpack(ctx, s, fmt.Sprintf("mount '%s'", m.Target), m.archive, source, m.dir+"/", "", ""); err != nil {
			return "", err
		}
	case barchan.MountSecret:
		return w.fillSecret(ctx, s, m, env)
	case barchan.MountTmpfs:
	}
	return w.link(ctx, s, m)
}

// link has the target lead to a file that is mounted elsewhere.
func (w *Work) link(ctx context.Context, s *started, m *mount) (string, error) {
	if at := path.Join(m.dir, m.file); m.file != "" && m.Target != "" && path.Clean(m.Target) != at {
		link := path.Clean(m.Target)
		return link, w.script(ctx, s, fmt.Sprintf("mount '%s'", m.Target), linkScript, at, link)
	}
	return "", nil
}

func (w *Work) fillSecret(ctx context.Context, s *started, m *mount, env map[string]string) (link string, err error) {
	secret, has := w.r.Store.Secrets(w.Build.UID)[m.ID]
	switch {
	case !has && m.Required:
		return "", buildlog.Refuse(w.Log.Step, "the build has no secret '%s'; it is in memory alone until the build or the server ends: start the build again with it", m.ID)
	case !has:
		return "", nil
	case m.Env != "":
		env[m.Env] = string(secret)
		return "", nil
	}
	agent, err := w.r.Agents.AgentAs(s.Sandbox, rootUser)
	if err != nil {
		return "", err
	}
	at := path.Join(m.dir, m.file)
	if _, err := agent.Upload(ctx, at, strings.NewReader(string(secret)), nil); err != nil {
		return "", w.agentError(ctx, s, fmt.Sprintf("mount secret '%s'", m.ID), err)
	}
	if err := w.own(ctx, s, m, secretMode, at); err != nil {
		return "", err
	}
	return w.link(ctx, s, m)
}

func (w *Work) own(ctx context.Context, s *started, m *mount, mode, file string) error {
	return w.script(ctx, s, fmt.Sprintf("mount '%s'", cmp.Or(m.Target, file)), ownScript, cmp.Or(m.Owner, rootOwner), cmp.Or(m.Mode, mode), file)
}

// keepCache keeps the content of a cache. One that cannot be kept ends no build: the cache stays as it was.
func (w *Work) keepCache(ctx context.Context, s *started, m *mount) {
	if err := w.pack(ctx, s, m.archive, fmt.Sprintf("keep cache '%s'", m.ID), []string{m.dir}, &barchan.StageFiles{}); err != nil {
		w.Log.Say(builds.LevelWarn, "cache '%s' is not kept: %s", m.ID, errs.Text(err))
	}
}
