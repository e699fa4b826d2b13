package bundle

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/barchan-dev/barchan/internal/config"
)

const (
	redacted = "[removed]"
	// shortestSecret is the length in bytes from which a line of a credential's file is removed wherever it appears.
	shortestSecret = 8
	// maxCredential bounds the bytes that are read of one credential's file.
	maxCredential = 64 << 10
)

// redactor removes secrets from text: those of the data directory's credentials literally, others by their form.
type redactor struct{ literals *strings.Replacer }

// newRedactor reads the credentials of the data directory. One that cannot be read cannot be in what this user reads either.
func newRedactor(settings *config.Resolved) *redactor {
	files, _ := filepath.Glob(filepath.Join(settings.DataDir, "credentials", "*"))
	files = append(files, settings.TokenSecret, settings.SecretsKey, settings.MemoryKey, settings.ACMEUpdateKeyFile)
	var pairs []string
	for _, name := range files {
		for _, line := range readCredential(name) {
			pairs = append(pairs, line, redacted)
		}
	}
	return &redactor{strings.NewReplacer(pairs...)}
}

// readCredential returns the lines of a small file that may be secrets: words without spaces. A kubeconfig's are after a colon.
func readCredential(name string) (secrets []string) {
	if info, err := os.Stat(name); err != nil || !info.Mode().IsRegular() || info.Size() > maxCredential {
		return nil
	}
	content, err := os.ReadFile(name)
	if err != nil {
		return nil
	}
	yaml := strings.HasSuffix(name, ".kubeconfig")
	for line := range strings.Lines(string(content)) {
		key, value, pair := strings.Cut(line, ":")
		key = strings.Trim(key, " -")
		switch {
		case yaml && (!pair || key != "token" && key != "password" && !strings.HasSuffix(key, "-data")):
			continue
		case yaml:
			line = value
		}
		if line = strings.Trim(line, " \t\r\n\"'"); len(line) >= shortestSecret && !strings.Contains(line, " ") {
			secrets = append(secrets, line)
		}
	}
	return secrets
}

// known removes the secrets that the redactor has read.
func (r *redactor) known(content []byte) []byte { return []byte(r.literals.Replace(string(content))) }

// forms are the forms of secrets in free text, and their replacements, in the order of their use.
var forms = []struct {
	form *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----`), redacted},
	{regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^\s"'\\/@]*@)?([^\s"'\\/?#,;)]+)[/?#][^\s"'\\,;)]*`), "$1$2/" + redacted}, // paths have keys too: those of webhooks
	{regexp.MustCompile(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s"'\\/@]*@`), "$1"},
	{regexp.MustCompile(`\?[^\s"'\\]*=[^\s"'\\]*`), "?" + redacted},
	{regexp.MustCompile(`(?i)\b(bearer|basic|digest)\s+[^\s"'\\]+`), "$1 " + redacted},
	{
		regexp.MustCompile(`(?i)([a-z0-9_.-]*(?:token|secret|passw|passphrase|credential|signature|cookie|authorization|` +
			`(?:api|access|private|signing|encryption|license)[-_]?key|_key)[a-z0-9_.-]*\\?["']?\s*[:=]\s*)` +
			`(?:\\?"(?:[^"\\]|\\[^"])*\\?"|'[^']*'|[^\s,}"']+)`),
		"$1" + redacted,
	},
	{regexp.MustCompile(`\b(?:e2b|sk|ghp|gho|ghs|glpat|xox[a-z])[_-][A-Za-z0-9_-]{8,}`), redacted},
	{regexp.MustCompile(`\bAKIA[A-Z0-9]{12,}`), redacted},
	{regexp.MustCompile(`\beyJ[A-Za-z0-9_=-]+(?:\.[A-Za-z0-9_=-]*)*`), redacted}, // JSON Web Tokens
}

// longRun matches what may be a key in hexadecimal or base64; digest is what is not one.
var (
	longRun = regexp.MustCompile(`(?:sha256:)?[A-Za-z0-9_+-]{40,}=*`)
	digest  = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// text removes secrets from free text, by the values of the credentials and by form.
func (r *redactor) text(s string) string {
	s = r.literals.Replace(s)
	for _, f := range forms {
		s = f.form.ReplaceAllString(s, f.with)
	}
	return longRun.ReplaceAllStringFunc(s, func(run string) string {
		if digest.MatchString(run) || !strings.ContainsAny(run, "0123456789") {
			return run
		}
		return redacted
	})
}

// tree removes secrets from all strings of decoded JSON.
func (r *redactor) tree(v any) any {
	switch v := v.(type) {
	case string:
		return r.text(v)
	case []any:
		for i := range v {
			v[i] = r.tree(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = r.tree(v[k])
		}
	}
	return v
}

// isAccess reports whether a line of the log is one of the access log, which has paths and clients of tenants.
func isAccess(line string) bool {
	return strings.Contains(line, " msg=request ") || strings.Contains(line, `"msg":"request"`)
}

// withoutAccess removes the access log from the server's log, and counts the removed lines.
func withoutAccess(log string) (rest string, lines int) {
	var b strings.Builder
	for line := range strings.Lines(log) {
		if isAccess(line) {
			lines++
			continue
		}
		b.WriteString(line)
	}
	return b.String(), lines
}
