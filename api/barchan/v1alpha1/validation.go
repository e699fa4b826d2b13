package v1alpha1

import (
	"bytes"
	"regexp"
	"unicode/utf8"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
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
	if k.Spec.Scope != "" && !k.Spec.Scope.Known() {
		errs = append(errs, field.NotSupported(spec.Child("scope"), k.Spec.Scope, KeyScopes()))
	}
	return append(errs, validateSSHKeys(spec.Child("sshKeys"), k.Spec.SSHKeys)...)
}

func validateSSHKeys(path *field.Path, keys []string) (errs field.ErrorList) {
	if len(keys) > MaxSSHKeys {
		errs = append(errs, field.TooMany(path, len(keys), MaxSSHKeys))
	}
	seen := map[string]bool{}
	for i, text := range keys {
		fingerprint, err := SSHFingerprint(text)
		switch {
		case err != nil:
			errs = append(errs, field.Invalid(path.Index(i), "(hidden)", err.Error())) // it may be a private key by mistake
		case seen[fingerprint]:
			errs = append(errs, field.Duplicate(path.Index(i), fingerprint))
		}
		seen[fingerprint] = true
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
