package dashboard

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
)

// revisionView is one revision of a tag of a template.
type revisionView struct {
	Tag      string    `json:"tag"`
	Number   int64     `json:"number"`
	Revision string    `json:"revision"`
	Seen     time.Time `json:"seen"` // first, to the second
	Current  bool      `json:"current,omitempty"`
	// Sandboxes are those of the session's namespace that run it, members of pools included.
	Sandboxes int `json:"sandboxes"`
}

// revisions shows the history of a template, newest first, and what still runs of each revision.
func (s *Server) revisions(w http.ResponseWriter, r *http.Request, who caller) error {
	t, err := s.cfg.Template(r.Context(), who.Namespace, r.PathValue("id"))
	if err != nil {
		return err
	}
	var objects extensions.SandboxTemplateList
	if err := s.cfg.Objects.List(r.Context(), &objects, client.InNamespace(t.Namespace)); err != nil {
		return err
	}
	tagOf := func(uid types.UID) int {
		return slices.IndexFunc(t.Tags, func(tag templates.Tag) bool { return tag.UID == uid })
	}
	current := map[types.UID]string{}
	for i := range objects.Items {
		o := &objects.Items[i]
		if tagOf(o.UID) < 0 {
			continue
		}
		if current[o.UID], _, err = pool.Revision(o); err != nil {
			return err
		}
	}
	var list barchan.TemplateRevisionList
	if err := s.cfg.Live.List(r.Context(), &list, client.InNamespace(t.Namespace)); err != nil {
		return err
	}
	runs := map[[2]string]int{}
	all, err := s.cfg.Cache.Sandboxes(r.Context(), who.Namespace)
	if err != nil {
		return err
	}
	for _, o := range all {
		if key := pool.TemplateKey(o); key.Namespace == t.Namespace {
			runs[[2]string{key.Name, pool.RevisionOf(o)}]++
		}
	}
	views := []revisionView{}
	for i := range list.Items {
		x := &list.Items[i]
		owner := metav1.GetControllerOf(x)
		if owner == nil {
			continue
		}
		at := tagOf(owner.UID)
		if at < 0 {
			continue
		}
		views = append(views, revisionView{
			Tag: t.Tags[at].Name, Number: x.Spec.Number, Revision: x.Spec.Revision, Seen: x.CreationTimestamp.Time,
			Current: current[owner.UID] == x.Spec.Revision, Sandboxes: runs[[2]string{x.Spec.TemplateName, x.Spec.Revision}],
		})
	}
	slices.SortFunc(views, func(a, b revisionView) int {
		return cmp.Or(b.Seen.Compare(a.Seen), cmp.Compare(a.Tag, b.Tag), cmp.Compare(b.Number, a.Number))
	})
	return writeJSON(w, views)
}
