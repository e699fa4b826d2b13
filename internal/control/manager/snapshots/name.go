package snapshots

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strconv"
	"strings"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// tagLatest selects the newest snapshot of a name, as the default tag does, unless one has exactly that tag.
const tagLatest = "latest"

// maxName bounds a snapshot's name and its tag: each is a label.
const maxName = 63

var (
	nameForm = regexp.MustCompile(`^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$`)
	tagForm  = regexp.MustCompile(`^[a-z0-9]+([-.][a-z0-9]+)*$`)
)

// fullName is a snapshot's name as a client writes it; either part may be empty.
type fullName struct{ name, tag string }

// parseName reads the name of a snapshot that is to be made.
func parseName(namespace, text string) (fullName, error) {
	if team, rest, qualified := strings.Cut(text, "/"); qualified {
		if team != namespace {
			return fullName{}, apistatus.Refuse(errs.ErrInvalid, "name: %q is not your team; leave it out, or write %q", team, namespace+"/"+rest)
		}
		text = rest
	}
	name, tag, tagged := strings.Cut(text, ":")
	if name != "" && (len(name) > maxName || !nameForm.MatchString(name)) || name == "" && text != "" {
		return fullName{}, apistatus.Refuse(errs.ErrInvalid, "name: %q must have from 1 to %d lower-case letters, digits, dashes and underscores, and begin and end with a letter or digit", name, maxName)
	}
	if tagged && (len(tag) > maxName || !tagForm.MatchString(tag)) {
		return fullName{}, apistatus.Refuse(errs.ErrInvalid, "name: the tag %q must have from 1 to %d lower-case letters and digits, with single dashes and dots between them", tag, maxName)
	}
	return fullName{name, tag}, nil
}

// orElse fills in the missing parts: the name of the sandbox's template, or of the sandbox without one, and a
// new tag.
func (n fullName) orElse(s *agents.Sandbox) fullName {
	if n.name == "" {
		name := strings.ReplaceAll(cmp.Or(s.Annotations[pool.AnnotationTemplateName], s.Annotations[agents.AnnotationTemplateRef], s.Name), ".", "-")
		n.name = strings.Trim(name[:min(len(name), maxName)], "-_")
	}
	if n.tag == "" {
		n.tag = newTag()
	}
	return n
}

// newTag returns a new tag. Later tags sort behind it, to the millisecond.
func newTag() string {
	return strconv.FormatInt(time.Now().UnixMilli(), 36) + strings.ToLower(rand.Text()[:4])
}

// object is the name of the Checkpoint. Names of objects have no underscores: those of a snapshot become
// dashes, and a hash of its ID keeps it distinct from the snapshot with dashes.
func (n fullName) object() string {
	plain := n.name + "-" + n.tag
	if !strings.Contains(n.name, "_") {
		return plain
	}
	sum := sha256.Sum256([]byte(n.name + ":" + n.tag))
	return strings.ReplaceAll(plain, "_", "-") + "-" + hex.EncodeToString(sum[:5])
}

// label names the object of a snapshot.
func (n fullName) label(c *barchan.Checkpoint) {
	c.Name = n.object()
	c.Labels[barchan.LabelSnapshot], c.Labels[barchan.LabelTag] = n.name, n.tag
}

// nameOf is a checkpoint's name for clients.
func nameOf(c *barchan.Checkpoint) fullName {
	name, tag := c.SnapshotName()
	return fullName{name, tag}
}

// newest reports whether the newest snapshot of the name is meant.
func (n fullName) newest() bool {
	return n.tag == "" || n.tag == barchan.DefaultTag || n.tag == tagLatest
}

// splitID parses a requested name; false if it cannot belong to the team.
func splitID(namespace, requested string) (fullName, bool) {
	if team, rest, qualified := strings.Cut(requested, "/"); qualified {
		if team != namespace {
			return fullName{}, false
		}
		requested = rest
	}
	name, tag, _ := strings.Cut(requested, ":")
	return fullName{name, tag}, name != ""
}
