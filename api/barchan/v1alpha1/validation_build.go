package v1alpha1

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Numbers of stages and steps of a build, and of what a step has.
const (
	maxBuildStages = 32
	maxBuildSteps  = 256
	maxStepArgs    = 256
	maxStepMounts  = 16
	maxStagePaths  = 64
	maxPath        = 4096
	maxMountID     = 253
)

var (
	mountOwner = regexp.MustCompile(`^[0-9]{1,10}:[0-9]{1,10}$`)
	mountMode  = regexp.MustCompile(`^0?[0-7]{3,4}$`)
	variable   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	secretID   = regexp.MustCompile(`^[A-Za-z0-9_]([-A-Za-z0-9_.]{0,252})$`)
)

// ValidSecretID reports whether a text can be the ID of a secret, which is a file's name too.
func ValidSecretID(id string) bool { return secretID.MatchString(id) }

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
	if b.Spec.From != nil {
		errs = append(errs, validateSource(b.Spec.From, spec.Child("from"))...)
	}
	stages, more := validateStages(b.Spec.Stages, spec.Child("stages"))
	errs = append(errs, more...)
	errs = append(errs, validateSteps(b.Spec.Steps, stages, spec.Child("steps"))...)
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

func validateSource(from *BuildSource, at *field.Path) (errs field.ErrorList) {
	if (from.Image != "") == (from.TemplateName != "") {
		errs = append(errs, field.Invalid(at, "", "must name either an image or a template"))
	}
	return append(errs, validatePullSecrets(from, at.Child("imagePullSecrets"))...)
}

// maxPullSecrets bounds the Secrets that are read for an image.
const maxPullSecrets = 16

func validatePullSecrets(from *BuildSource, at *field.Path) (errs field.ErrorList) {
	n := len(from.ImagePullSecrets)
	if n > 0 && from.Image == "" {
		errs = append(errs, field.Forbidden(at, "are for an image"))
	}
	if n > maxPullSecrets {
		errs = append(errs, field.TooMany(at, n, maxPullSecrets))
	}
	for i, ref := range from.ImagePullSecrets {
		for _, problem := range validation.IsDNS1123Subdomain(ref.Name) {
			errs = append(errs, field.Invalid(at.Index(i).Child("name"), ref.Name, problem))
		}
	}
	return errs
}

// validateStages returns the names of the stages too.
func validateStages(stages []BuildStage, at *field.Path) (names []string, errs field.ErrorList) {
	if n := len(stages); n > maxBuildStages {
		errs = append(errs, field.TooMany(at, n, maxBuildStages))
	}
	for i := range stages {
		s, at := &stages[i], at.Index(i)
		if problems := validation.IsDNS1123Label(s.Name); len(problems) > 0 {
			errs = append(errs, field.Invalid(at.Child("name"), s.Name, strings.Join(problems, "; ")))
		} else if slices.Contains(names, s.Name) {
			errs = append(errs, field.Duplicate(at.Child("name"), s.Name))
		}
		errs = append(errs, validateSource(&s.From, at.Child("from"))...)
		errs = append(errs, validateSteps(s.Steps, names, at.Child("steps"))...)
		names = append(names, s.Name)
	}
	return names, errs
}

func validateSteps(steps []BuildStep, stages []string, at *field.Path) (errs field.ErrorList) {
	if n := len(steps); n > maxBuildSteps {
		errs = append(errs, field.TooMany(at, n, maxBuildSteps))
	}
	for i := range steps {
		errs = append(errs, validateStep(&steps[i], stages, at.Index(i))...)
	}
	return errs
}

func validateStep(s *BuildStep, stages []string, at *field.Path) (errs field.ErrorList) {
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
	if hash := at.Child("filesHash"); (s.Type == StepCopy && s.From == nil) != (s.FilesHash != "") {
		errs = append(errs, field.Invalid(hash, s.FilesHash, "is of a Copy, which needs it or from"))
	} else if s.FilesHash != "" && !sha256Hex.MatchString(s.FilesHash) {
		errs = append(errs, field.Invalid(hash, s.FilesHash, "must be 64 lower-case hex digits"))
	}
	return append(errs, validateExtras(s, stages, at)...)
}

// validateExtras checks what only some types of steps have.
func validateExtras(s *BuildStep, stages []string, at *field.Path) (errs field.ErrorList) {
	switch from := at.Child("from"); {
	case s.From == nil:
	case s.Type != StepCopy:
		errs = append(errs, field.Forbidden(from, "is of a Copy"))
	default:
		errs = append(errs, validateStage(s.From.Stage, stages, from.Child("stage"))...)
		errs = append(errs, validatePaths(s.From.Paths, from.Child("paths"))...)
		errs = append(errs, validatePaths(s.From.Exclude, from.Child("exclude"))...)
	}
	switch network := at.Child("network"); {
	case s.Network == "":
	case s.Type != StepRun:
		errs = append(errs, field.Forbidden(network, "is of a Run"))
	case s.Network != NetworkNone:
		errs = append(errs, field.NotSupported(network, s.Network, []BuildNetwork{NetworkNone}))
	}
	mounts, n := at.Child("mounts"), len(s.Mounts)
	if s.Type != StepRun && n > 0 {
		return append(errs, field.Forbidden(mounts, "are of a Run"))
	}
	if n > maxStepMounts {
		errs = append(errs, field.TooMany(mounts, n, maxStepMounts))
	}
	used := map[string]bool{}
	for i := range s.Mounts {
		m := &s.Mounts[i]
		errs = append(errs, validateMount(m, stages, mounts.Index(i))...)
		if target := path.Clean(m.Target); m.Target != "" && used[target] {
			errs = append(errs, field.Duplicate(mounts.Index(i).Child("target"), m.Target))
		} else if m.Target != "" {
			used[target] = true
		}
	}
	return errs
}

func validateStage(name string, stages []string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	if !slices.Contains(stages, name) {
		return field.ErrorList{field.NotFound(at, name)}
	}
	return nil
}

func validatePaths(paths []string, at *field.Path) (errs field.ErrorList) {
	if n := len(paths); n > maxStagePaths {
		errs = append(errs, field.TooMany(at, n, maxStagePaths))
	}
	for i, p := range paths {
		if p == "" {
			errs = append(errs, field.Required(at.Index(i), ""))
		} else if len(p) > maxPath {
			errs = append(errs, field.TooLong(at.Index(i), "", maxPath))
		}
	}
	return errs
}

func validateMount(m *BuildMount, stages []string, at *field.Path) (errs field.ErrorList) {
	all := []BuildMountType{MountCache, MountBind, MountTmpfs, MountSecret}
	if !slices.Contains(all, m.Type) {
		return field.ErrorList{field.NotSupported(at.Child("type"), m.Type, all)}
	}
	errs = append(validateMountFields(m, at), validateMountForms(m, at)...)
	errs = append(errs, validateTarget(m, at.Child("target"))...)
	switch {
	case m.Type == MountBind && m.Stage != "":
		errs = append(errs, validateStage(m.Stage, stages, at.Child("stage"))...)
		if m.FilesHash != "" {
			errs = append(errs, field.Forbidden(at.Child("filesHash"), "is of a Bind without a stage"))
		}
	case m.Type == MountBind && m.FilesHash == "":
		errs = append(errs, field.Required(at.Child("filesHash"), "or stage"))
	case m.Type == MountSecret && !ValidSecretID(m.ID):
		errs = append(errs, field.Invalid(at.Child("id"), m.ID, "must be letters, digits, dashes, dots and underscores, and not begin with a dash or a dot"))
	case len(m.ID) > maxMountID:
		errs = append(errs, field.TooLong(at.Child("id"), "", maxMountID))
	}
	return errs
}

func validateTarget(m *BuildMount, at *field.Path) field.ErrorList {
	switch {
	case m.Target == "" && m.Type != MountSecret:
		return field.ErrorList{field.Required(at, "")}
	case m.Target != "" && (!path.IsAbs(m.Target) || path.Clean(m.Target) == "/"):
		return field.ErrorList{field.Invalid(at, m.Target, "must be an absolute path below the root")}
	case m.Type == MountSecret && m.Target != "" && m.Env != "":
		return field.ErrorList{field.Forbidden(at, "is of a Secret that is a file")}
	}
	return nil
}

// validateMountFields refuses fields of other types of mounts.
func validateMountFields(m *BuildMount, at *field.Path) (errs field.ErrorList) {
	own := func(name string, set bool, types ...BuildMountType) {
		if set && !slices.Contains(types, m.Type) {
			errs = append(errs, field.Forbidden(at.Child(name), fmt.Sprintf("is of no %s", m.Type)))
		}
	}
	own("id", m.ID != "", MountCache, MountSecret)
	own("sharing", m.Sharing != "", MountCache)
	own("stage", m.Stage != "", MountBind)
	own("filesHash", m.FilesHash != "", MountBind)
	own("source", m.Source != "", MountBind)
	own("owner", m.Owner != "", MountCache, MountSecret)
	own("mode", m.Mode != "", MountCache, MountSecret)
	own("sizeBytes", m.SizeBytes != 0, MountTmpfs)
	own("env", m.Env != "", MountSecret)
	own("required", m.Required, MountSecret)
	return errs
}

// validateMountForms refuses values of another form.
func validateMountForms(m *BuildMount, at *field.Path) (errs field.ErrorList) {
	form := func(name, value string, pattern *regexp.Regexp, message string) {
		if value != "" && !pattern.MatchString(value) {
			errs = append(errs, field.Invalid(at.Child(name), value, message))
		}
	}
	form("filesHash", m.FilesHash, sha256Hex, "must be 64 lower-case hex digits")
	form("owner", m.Owner, mountOwner, "must be the IDs of a user and of a group, with a colon between them")
	form("mode", m.Mode, mountMode, "must be octal, such as 0755")
	form("env", m.Env, variable, "must be the name of a variable")
	if s := m.Sharing; s != "" && s != SharingShared && s != SharingPrivate && s != SharingLocked {
		errs = append(errs, field.NotSupported(at.Child("sharing"), s, []CacheSharing{SharingShared, SharingPrivate, SharingLocked}))
	}
	if m.SizeBytes < 0 {
		errs = append(errs, field.Invalid(at.Child("sizeBytes"), m.SizeBytes, "must be 0 or more"))
	}
	path := func(name, value string) {
		if len(value) > maxPath || strings.ContainsRune(value, 0) {
			errs = append(errs, field.Invalid(at.Child(name), "(not shown)", fmt.Sprintf("must be at most %d characters, without NUL", maxPath)))
		}
	}
	path("target", m.Target)
	path("source", m.Source)
	return errs
}
