package layers

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// stepTimeout bounds one step, startTimeout the start of a sandbox, captureTimeout a checkpoint and readyTimeout the wait for
	// the ready command.
	stepTimeout    = time.Hour
	startTimeout   = 10 * time.Minute
	captureTimeout = 30 * time.Minute
	readyTimeout   = 10 * time.Minute
)

// form is the version of how steps are run. Raise it when results of the same steps change.
const form = 1

// maxLayers bounds the layers of a build: each slows down lookups of files, and the node stacks 64.
const maxLayers = 60

const (
	rootUser = "root"
	// defaultWorkdir is that of a build from an image, as in E2B.
	defaultWorkdir = "/home/user"
)

// settings are what steps set for those that follow, and for the sandboxes of the template.
type settings struct {
	// User is a name; empty: the agent decides.
	User    string            `json:"user"`
	Workdir string            `json:"workdir"`
	Env     map[string]string `json:"env,omitempty"`
}

// Base is what the layers of a build lie on.
type Base struct {
	blueprint agents.SandboxBlueprint
	policies  *agents.BarchanSpec
	// checkpoint has the files; empty: those of the image.
	checkpoint string
	settings   settings
	// key identifies all of it.
	key string
	// pullSecrets have the credentials for the image; a template has its own.
	pullSecrets []corev1.LocalObjectReference
	// prepared: it has the default user.
	prepared bool
}

// layer is a group of steps whose files are kept together.
type layer struct {
	key string
	// first is the index of its first step. A layer without steps prepares an image.
	first int
	steps []barchan.BuildStep
	// before and after are the settings before its first and after its last step.
	before, after settings
}

// checkpoint returns the name of the Checkpoint with a layer's files.
func (l *layer) checkpoint() string { return "build-" + l.key }

// layersOf groups the steps of a build, or of a stage. stages has the keys of those whose files they take. salt is not empty
// for a build whose forced steps may not take kept results.
func layersOf(b *Base, steps []barchan.BuildStep, force bool, salt string, stages map[string]string) ([]layer, settings, error) {
	var all []layer
	key, now := b.key, b.settings
	if force {
		key = hashOf(key, salt)
	}
	if !b.prepared {
		l := layer{key: hashOf(form, key, "prepare", prepareScript), before: now, after: now}
		all, key = append(all, l), l.key
	}
	open := layer{before: now}
	for i, step := range steps {
		if step.Force && !force {
			key = hashOf(key, salt)
		}
		key = hashOf(form, key, step.Type, step.Args, step.FilesHash)
		if more := besides(&step, stages); len(more) > 0 {
			key = hashOf(key, more)
		}
		now = now.with(&step)
		open.steps = append(open.steps, step)
		if step.Type == barchan.StepRun || step.Type == barchan.StepCopy {
			open.key, open.after = key, now
			all = append(all, open)
			open = layer{first: i + 1, before: now}
		}
	}
	if slices.ContainsFunc(open.steps, func(s barchan.BuildStep) bool { return s.Type != barchan.StepEnv }) {
		open.key, open.after = key, now
		all = append(all, open)
	}
	if len(all) > maxLayers {
		return nil, now, buildlog.Refuse(barchan.BuildStepBase, "spec.steps: %d of them change files, the maximum is %d; join some of the commands", len(all), maxLayers)
	}
	return all, now, nil
}

// besides returns what decides the result of a step besides its arguments and uploaded files. A secret's content is not of it,
// and the content of a cache is not.
func besides(step *barchan.BuildStep, stages map[string]string) (parts []any) {
	if from := step.From; from != nil {
		what := *from
		what.Stage = stages[from.Stage]
		parts = append(parts, what)
	}
	for _, m := range step.Mounts {
		m.Stage = stages[m.Stage]
		parts = append(parts, m)
	}
	if step.Network != "" {
		parts = append(parts, step.Network)
	}
	return parts
}

// with returns the settings after a step.
func (s settings) with(step *barchan.BuildStep) settings {
	switch step.Type {
	case barchan.StepWorkdir:
		s.Workdir = absolute(step.Args[0], s.Workdir)
	case barchan.StepUser:
		s.User = step.Args[0]
	case barchan.StepEnv:
		s.Env = maps.Clone(s.Env)
		if s.Env == nil {
			s.Env = map[string]string{}
		}
		for i := 0; i+1 < len(step.Args); i += 2 {
			s.Env[step.Args[i]] = step.Args[i+1]
		}
	case barchan.StepRun, barchan.StepCopy:
	}
	return s
}

// absolute returns a path that may be relative to a directory.
func absolute(p, dir string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	return path.Join("/", dir, p)
}

// hashBytes are of a SHA-256: 160 bits.
const hashBytes = 20

// hashOf returns the hash of parts, 40 hex digits.
func hashOf(parts ...any) string { return longHashOf(parts...)[:2*hashBytes] }

// longHashOf returns it whole, 64 hex digits, as names of archives have.
func longHashOf(parts ...any) string {
	text, err := json.Marshal(parts)
	if err != nil {
		panic(fmt.Sprintf("templatebuild: hash: %v", err)) // parts are plain values
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// ImageBase returns the base of an image. Its entrypoint does not run, for E2B's templates have none but their start command.
// secrets have the credentials for its registry.
func ImageBase(image, digest string, secrets ...corev1.LocalObjectReference) *Base {
	return &Base{
		pullSecrets: secrets,
		blueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "sandbox", Image: image, Command: []string{"/bin/sh", "-c", "exit 0"}}},
		}}},
		settings: settings{User: envd.DefaultUser, Workdir: defaultWorkdir},
		key:      hashOf(form, "image", image, digest),
	}
}

// TemplateBase returns the base of a template, with its files alone. The settings are those that its sandboxes have.
func TemplateBase(t *extensions.SandboxTemplate, revision, namespace string) (*Base, error) {
	b := &Base{blueprint: *t.Spec.SandboxBlueprint.DeepCopy(), key: hashOf(form, "template", t.Namespace, t.Name, revision), prepared: true}
	if n := len(b.blueprint.PodTemplate.Spec.Containers); n != 1 {
		return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' has %d containers; a build starts from one of a single container", t.Name, n)
	}
	if len(b.blueprint.VolumeClaimTemplates) > 0 {
		return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' has volumes, which a build does not keep", t.Name)
	}
	if s := t.Spec.Barchan; s != nil && s.Sandbox != nil {
		b.policies = s.Sandbox.DeepCopy()
		if from := b.policies.Restore; from != nil {
			if t.Namespace != namespace {
				return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' starts from a checkpoint of another namespace", t.Name)
			}
			b.checkpoint = from.CheckpointName
		}
		b.settings.User = b.policies.DefaultUser
		b.policies.Restore, b.policies.WarmUp = nil, nil
	}
	c := &b.blueprint.PodTemplate.Spec.Containers[0]
	b.settings.Workdir = c.WorkingDir
	return b, nil
}
