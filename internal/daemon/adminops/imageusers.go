package adminops

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
)

// imageUsers are what needs an image, by names that users know.
type imageUsers struct{ sandboxes, checkpoints, templates []string }

// newImageUsers adds the objects that name an image to those that were made from it: sandboxes that have not started, and
// templates. Sandboxes that are being deleted need no image. full is the image's whole name.
func newImageUsers(
	full string, made []sandbox.Ref, checkpoints []sandbox.CheckpointRef, objects []agents.Sandbox, templates []extensions.SandboxTemplate,
) (u imageUsers) {
	names := func(p *corev1.PodSpec) bool {
		return slices.ContainsFunc(p.Containers, func(c corev1.Container) bool {
			name, err := ctrd.Normalize(c.Image)
			return err == nil && name == full
		})
	}
	deleting := map[types.UID]bool{}
	for i := range objects {
		deleting[objects[i].UID] = objects[i].DeletionTimestamp != nil
	}
	for _, r := range made {
		if !deleting[r.UID] {
			u.sandboxes = append(u.sandboxes, string(sandbox.IDOf(r.UID)))
		}
	}
	for i := range objects {
		if deleting[objects[i].UID] {
			continue
		}
		switch s := &objects[i]; sandbox.PhaseOf(s) { //nolint:exhaustive // the others have all they need
		case sandbox.Pending, sandbox.Starting:
			if id := string(sandbox.IDOf(s.UID)); names(&s.Spec.PodTemplate.Spec) && !slices.Contains(u.sandboxes, id) {
				u.sandboxes = append(u.sandboxes, id)
			}
		}
	}
	for _, c := range checkpoints {
		u.checkpoints = append(u.checkpoints, c.Namespace+"/"+c.Name)
	}
	for i := range templates {
		if t := &templates[i]; names(&t.Spec.PodTemplate.Spec) {
			u.templates = append(u.templates, t.Namespace+"/"+t.Name)
		}
	}
	for _, list := range [][]string{u.sandboxes, u.checkpoints, u.templates} {
		slices.Sort(list)
	}
	return u
}

// refusal names what needs an image, and what to do; nil if it may be removed.
func (u imageUsers) refusal(ref string, force bool) error {
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
