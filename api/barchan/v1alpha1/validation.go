package v1alpha1

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

var (
	sha256Hex = regexp.MustCompile(`^[0-9a-f]{64}$`)
	revision  = regexp.MustCompile(`^[0-9a-v]{52}$`)
)

// maxPrefix is how many characters of a key may be stored in clear.
const maxPrefix = 12

// SetCheckpointDefaults fills what the user left out.
func SetCheckpointDefaults(c *Checkpoint) {
	if c.Spec.Content == "" {
		c.Spec.Content = ContentMemoryAndFiles
	}
	if c.Spec.Origin == "" {
		c.Spec.Origin = OriginSandbox
	}
}

// ValidateCheckpoint checks a checkpoint after defaulting. old is nil on create.
func ValidateCheckpoint(c, old *Checkpoint) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if c.Spec.SandboxName == "" {
		errs = append(errs, field.Required(spec.Child("sandboxName"), ""))
	}
	if c.Spec.Content != ContentMemoryAndFiles && c.Spec.Content != ContentFiles {
		errs = append(errs, field.NotSupported(spec.Child("content"), c.Spec.Content, []CheckpointContent{ContentMemoryAndFiles, ContentFiles}))
	}
	if c.Spec.Origin != OriginSandbox && c.Spec.Origin != OriginImport {
		errs = append(errs, field.NotSupported(spec.Child("origin"), c.Spec.Origin, []CheckpointOrigin{OriginSandbox, OriginImport}))
	}
	if c.Spec.TTLSeconds != nil && *c.Spec.TTLSeconds < 0 {
		errs = append(errs, field.Invalid(spec.Child("ttlSeconds"), *c.Spec.TTLSeconds, "must be 0 or more"))
	}
	if old != nil {
		now, was := c.Spec, old.Spec
		now.TTLSeconds, was.TTLSeconds = nil, nil
		if now != was {
			errs = append(errs, field.Forbidden(spec, "only ttlSeconds can change"))
		}
	}
	return errs
}

// ValidateAPIKey checks a key's object. The error never repeats the hash.
func ValidateAPIKey(k *APIKey) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if !sha256Hex.MatchString(k.Spec.SHA256) {
		errs = append(errs, field.Invalid(spec.Child("sha256"), "(hidden)", "must be 64 lower-case hex digits"))
	}
	if utf8.RuneCountInString(k.Spec.Prefix) > maxPrefix {
		errs = append(errs, field.TooLong(spec.Child("prefix"), "", maxPrefix))
	}
	return errs
}

// ValidateTemplateRevision checks an entry of a template's history. old is nil on create.
func ValidateTemplateRevision(r, old *TemplateRevision) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if r.Spec.TemplateName == "" {
		errs = append(errs, field.Required(spec.Child("templateName"), ""))
	}
	if !revision.MatchString(r.Spec.Revision) {
		errs = append(errs, field.Invalid(spec.Child("revision"), r.Spec.Revision, "must be 52 of the digits and letters 0-9a-v"))
	}
	if r.Spec.Number < 1 {
		errs = append(errs, field.Invalid(spec.Child("number"), r.Spec.Number, "must be 1 or more"))
	}
	switch content := bytes.TrimSpace(r.Spec.Content.Raw); {
	case len(content) == 0:
		errs = append(errs, field.Required(spec.Child("content"), ""))
	case content[0] != '{':
		errs = append(errs, field.TypeInvalid(spec.Child("content"), "(not shown)", "must be an object"))
	}
	if old != nil && !apiequality.Semantic.DeepEqual(r.Spec, old.Spec) {
		errs = append(errs, field.Forbidden(spec, "a revision is immutable"))
	}
	return errs
}

// Numbers of steps of a build, and of arguments of one.
const (
	maxBuildSteps = 256
	maxStepArgs   = 256
)

// ValidateTemplateBuild checks a build. old is nil on create.
func ValidateTemplateBuild(b, old *TemplateBuild) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	at := spec.Child("templateName")
	if b.Spec.TemplateName == "" {
		errs = append(errs, field.Required(at, ""))
	} else if problems := validation.IsDNS1123Subdomain(b.Spec.TemplateName); len(problems) > 0 {
		errs = append(errs, field.Invalid(at, b.Spec.TemplateName, strings.Join(problems, "; ")))
	}
	errs = append(errs, validateTags(b.Spec.Tags, spec.Child("tags"))...)
	if from := b.Spec.From; from != nil && (from.Image != "") == (from.TemplateName != "") {
		errs = append(errs, field.Invalid(spec.Child("from"), "", "must name either an image or a template"))
	}
	if n := len(b.Spec.Steps); n > maxBuildSteps {
		errs = append(errs, field.TooMany(spec.Child("steps"), n, maxBuildSteps))
	}
	for i := range b.Spec.Steps {
		errs = append(errs, validateStep(&b.Spec.Steps[i], spec.Child("steps").Index(i))...)
	}
	if old == nil {
		return errs
	}
	switch {
	case b.Spec.TemplateName != old.Spec.TemplateName:
		errs = append(errs, field.Forbidden(at, "is immutable"))
	case old.Spec.From != nil && !apiequality.Semantic.DeepEqual(b.Spec, old.Spec):
		errs = append(errs, field.Forbidden(spec, "cannot change once from is set"))
	}
	return errs
}

// MaxBuildTags bounds the tags of one build.
const MaxBuildTags = 32

func validateTags(tags []string, at *field.Path) (errs field.ErrorList) {
	if len(tags) > MaxBuildTags {
		return field.ErrorList{field.TooMany(at, len(tags), MaxBuildTags)}
	}
	for i, tag := range tags {
		errs = append(errs, agents.ValidateTag(tag, at.Index(i))...)
		if slices.Contains(tags[:i], tag) {
			errs = append(errs, field.Duplicate(at.Index(i), tag))
		}
	}
	return errs
}

func validateStep(s *BuildStep, at *field.Path) (errs field.ErrorList) {
	args, n := at.Child("args"), len(s.Args)
	least, most := 1, 1
	switch s.Type {
	case StepRun:
		most = 2
	case StepCopy:
		least, most = 2, 4
	case StepEnv:
		most = maxStepArgs
		if n%2 != 0 {
			errs = append(errs, field.Invalid(args, n, "must be names and values in turn"))
		}
	case StepWorkdir, StepUser:
	default:
		return field.ErrorList{field.NotSupported(at.Child("type"), s.Type, []BuildStepType{StepRun, StepCopy, StepWorkdir, StepUser, StepEnv})}
	}
	if n < least {
		errs = append(errs, field.Invalid(args, n, fmt.Sprintf("must be at least %d", least)))
	} else if n > most {
		errs = append(errs, field.TooMany(args, n, most))
	}
	if hash := at.Child("filesHash"); (s.Type == StepCopy) != (s.FilesHash != "") {
		errs = append(errs, field.Invalid(hash, s.FilesHash, "is of a Copy, which needs it"))
	} else if s.FilesHash != "" && !sha256Hex.MatchString(s.FilesHash) {
		errs = append(errs, field.Invalid(hash, s.FilesHash, "must be 64 lower-case hex digits"))
	}
	return errs
}
