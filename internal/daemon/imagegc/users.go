package imagegc

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
)

// Users are what needs an image, by names that operators know.
type Users struct{ sandboxes, checkpoints, templates, builds []string }

// none reports whether nothing needs the image.
func (u Users) none() bool {
	return len(u.sandboxes)+len(u.checkpoints)+len(u.templates)+len(u.builds) == 0
}

// objects are those that may name images.
type objects struct {
	sandboxes []agents.Sandbox
	templates []extensions.SandboxTemplate
	builds    []barchan.TemplateBuild
	// full has whole names by those that were written.
	full map[string]string
}

// is reports whether a written name is that of an image.
func (o *objects) is(written, full string) bool {
	if o.full == nil {
		o.full = map[string]string{}
	}
	whole, known := o.full[written]
	if !known {
		whole, _ = ctrd.Normalize(written) // empty: of no image
		o.full[written] = whole
	}
	return whole == full
}

func (o *objects) names(p *corev1.PodSpec, full string) bool {
	return slices.ContainsFunc(slices.Concat(p.InitContainers, p.Containers), func(c corev1.Container) bool { return o.is(c.Image, full) })
}

// waits reports whether a sandbox needs an image to start; those that have started have all they need.
func (o *objects) waits(s *agents.Sandbox, full string) bool {
	phase := sandbox.PhaseOf(s)
	return (phase == sandbox.Pending || phase == sandbox.Starting) && o.names(&s.Spec.PodTemplate.Spec, full)
}

// builtFrom reports whether a build that has not ended, or one of its stages, starts from an image.
func (o *objects) builtFrom(build *barchan.TemplateBuild, full string) bool {
	b := &build.Spec
	if build.Ended() {
		return false
	}
	return b.From != nil && o.is(b.From.Image, full) || slices.ContainsFunc(b.Stages, func(s barchan.BuildStage) bool { return o.is(s.From.Image, full) })
}

// users adds the objects that name an image to those that were made from it: sandboxes that have not started, templates, and
// builds that have not ended. Sandboxes that are being deleted need no image. full is the image's whole name.
func (o *objects) users(full string, made []sandbox.Ref, checkpoints []sandbox.CheckpointRef) (u Users) {
	deleting := map[types.UID]bool{}
	for i := range o.sandboxes {
		deleting[o.sandboxes[i].UID] = o.sandboxes[i].DeletionTimestamp != nil
	}
	for _, r := range made {
		if !deleting[r.UID] {
			u.sandboxes = append(u.sandboxes, string(sandbox.IDOf(r.UID)))
		}
	}
	for i := range o.sandboxes {
		s := &o.sandboxes[i]
		if id := string(sandbox.IDOf(s.UID)); !deleting[s.UID] && o.waits(s, full) && !slices.Contains(u.sandboxes, id) {
			u.sandboxes = append(u.sandboxes, id)
		}
	}
	for _, c := range checkpoints {
		u.checkpoints = append(u.checkpoints, c.Namespace+"/"+c.Name)
	}
	for i := range o.templates {
		if t := &o.templates[i]; o.names(&t.Spec.PodTemplate.Spec, full) {
			u.templates = append(u.templates, t.Namespace+"/"+t.Name)
		}
	}
	for i := range o.builds {
		if b := &o.builds[i]; o.builtFrom(b, full) {
			u.builds = append(u.builds, b.Namespace+"/"+b.Name)
		}
	}
	for _, list := range [][]string{u.sandboxes, u.checkpoints, u.templates, u.builds} {
		slices.Sort(list)
	}
	return u
}

// Refusal names what needs an image, and what to do; nil if it may be removed.
func (u Users) Refusal(ref string, force bool) error {
	const most = 10 // of a kind, by name
	var by []string
	list := func(kind string, names []string) {
		if more := len(names) - most; more > 0 {
			names = append(names[:most:most], fmt.Sprintf("%d more", more))
		}
		if len(names) > 0 {
			by = append(by, kind+" "+strings.Join(names, ", "))
		}
	}
	list("sandboxes", u.sandboxes)
	list("checkpoints", u.checkpoints)
	list("builds", u.builds)
	needed := len(by) > 0
	if !force {
		list("templates", u.templates)
	}
	advice := "delete them first"
	switch {
	case len(by) == 0:
		return nil
	case !needed:
		advice += ", or use --force: sandboxes of a template whose image is gone pull it again, or fail"
	}
	return errs.Public(errs.ErrConflict, fmt.Sprintf("remove image %s: it is used by %s; %s", ref, strings.Join(by, "; "), advice))
}
