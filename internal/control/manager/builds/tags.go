package builds

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// maxTags bounds the tags of a template: each may keep a checkpoint.
const maxTags = 100

// splitName returns the parts of a tenant's own "team/name:tag". Only the name is required.
func splitName(at, namespace, text string) (name, tag string, tagged bool, err error) {
	name, tag, tagged = strings.Cut(text, ":")
	if team, rest, qualified := strings.Cut(name, "/"); qualified {
		if team != namespace {
			return "", "", false, apistatus.Refuse(errs.ErrInvalid, "%s: %.80q is not your team; leave it out, or write %.80q", at, team, namespace+"/"+rest)
		}
		name = rest
	}
	if name == "" {
		return "", "", false, apistatus.Refuse(errs.ErrInvalid, "%s: must name a template", at)
	}
	return name, strings.ToLower(tag), tagged, nil
}

// cleanTags checks tags, and returns them in lower case and each once.
func cleanTags(tags []string) (clean []string, err error) {
	var list field.ErrorList
	for i, tag := range tags {
		tag = strings.ToLower(strings.TrimSpace(tag))
		list = append(list, agents.ValidateTag(tag, field.NewPath("tags").Index(i))...)
		if !slices.Contains(clean, tag) {
			clean = append(clean, tag)
		}
	}
	if len(clean) > barchan.MaxBuildTags {
		list = field.ErrorList{field.TooMany(field.NewPath("tags"), len(clean), barchan.MaxBuildTags)}
	}
	return clean, apistatus.InvalidFields(list)
}

// tagsOf returns the tags of the template of a name.
func tagsOf(all []extensions.SandboxTemplate, name string) (tags []extensions.SandboxTemplate) {
	for i := range all {
		if own, _ := all[i].NameAndTag(); own == name && all[i].DeletionTimestamp == nil {
			tags = append(tags, all[i])
		}
	}
	return tags
}

// tagIn returns the object of a tag; nil if there is none.
func tagIn(tags []extensions.SandboxTemplate, tag string) *extensions.SandboxTemplate {
	i := slices.IndexFunc(tags, func(t extensions.SandboxTemplate) bool {
		_, own := t.NameAndTag()
		return own == tag
	})
	if i < 0 {
		return nil
	}
	return &tags[i]
}

// checkTags refuses tags that a template cannot get.
func (s *Service) checkTags(ctx context.Context, namespace, name string, tags []string, all []extensions.SandboxTemplate) error {
	have := tagsOf(all, name)
	for i := range have {
		if have[i].Labels[barchan.LabelBuild] == "" {
			return apistatus.Refuse(errs.ErrConflict, "name: the template %q exists and was not made by a build; choose another name", name)
		}
	}
	count := len(have)
	for _, tag := range tags {
		if tagIn(have, tag) != nil {
			continue
		}
		count++
		object := extensions.TagObject(name, tag)
		if len(validation.IsDNS1123Subdomain(object)) > 0 {
			return apistatus.Refuse(errs.ErrInvalid, "tags: the name and the tag %q are too long together", tag)
		}
		if i := slices.IndexFunc(all, func(t extensions.SandboxTemplate) bool { return t.Name == object }); i >= 0 {
			other, otherTag := all[i].NameAndTag()
			return apistatus.Refuse(errs.ErrConflict, "tags: %q would have the same object as %q; choose another tag", name+":"+tag, other+":"+otherTag)
		}
		if tag == barchan.DefaultTag {
			continue
		}
		c, err := s.Snapshots.Find(ctx, namespace, name+":"+tag)
		if err == nil && c.SnapshotID() == name+":"+tag {
			return apistatus.Refuse(errs.ErrConflict, "tags: a snapshot %q exists; choose another tag, or delete the snapshot", name+":"+tag)
		} else if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return err
		}
	}
	if count > maxTags {
		return apistatus.Refuse(errs.ErrExhausted, "tags: a template has at most %d; remove some", maxTags)
	}
	return s.Quota.CheckRoom(ctx, namespace, quota.Templates, int64(count-len(have)))
}

// ofTenant reads the tags of a tenant's own template that builds made, by its name, alias or ID, from the API server.
func (s *Service) ofTenant(ctx context.Context, namespace, name string) (tags, all []extensions.SandboxTemplate, err error) {
	if all, err = s.Cache.CurrentTemplates(ctx, namespace); err != nil {
		return nil, nil, err
	}
	tags = tagsOf(all, templates.NameIn(all, name))
	if len(tags) == 0 {
		if _, err := s.Templates.Get(ctx, namespace, name); err != nil {
			return nil, nil, err
		}
	}
	applied := slices.ContainsFunc(tags, func(t extensions.SandboxTemplate) bool { return t.Labels[barchan.LabelBuild] == "" })
	switch {
	case s.Applied && len(tags) == 0:
		return nil, nil, apistatus.Refuse(errs.ErrForbidden, "the template %q is not in your namespace; its operator deletes it", name)
	case !s.Applied && (len(tags) == 0 || applied):
		return nil, nil, apistatus.Refuse(errs.ErrForbidden, "the template %q was not made by a build of yours, so its operator changes and deletes it; a snapshot of the same name is deleted by its ID, <name>:<tag>", name)
	}
	return tags, all, nil
}

// Tags returns the tags of a template that a tenant may use.
func (s *Service) Tags(ctx context.Context, namespace, name string) ([]templates.Tag, error) {
	all, err := s.Cache.CurrentTemplates(ctx, namespace)
	if err != nil {
		return nil, err
	}
	if own := tagsOf(all, templates.NameIn(all, name)); len(own) > 0 {
		return s.Templates.Group(own)[0].Tags, nil
	}
	t, err := s.Templates.Get(ctx, namespace, name)
	return t.Tags, err
}

// AssignTags has further tags refer to the build of the target, "<name>:<tag>". Without a tag the target is the tag default.
func (s *Service) AssignTags(ctx context.Context, namespace, target string, tags []string) (buildID string, assigned []string, err error) {
	name, tag, tagged, err := splitName("target", namespace, target)
	if err != nil {
		return "", nil, err
	}
	if tags, err = cleanTags(tags); err != nil {
		return "", nil, err
	}
	if len(tags) == 0 {
		return "", nil, apistatus.Refuse(errs.ErrInvalid, "tags: must have at least one tag")
	}
	if err := s.Gate.Err(); err != nil {
		return "", nil, err
	}
	have, all, err := s.ofTenant(ctx, namespace, name)
	if err != nil {
		return "", nil, err
	}
	ref := templates.Reference(tag, tagged)
	i := slices.IndexFunc(have, func(t extensions.SandboxTemplate) bool { return ref.Is(&t) })
	if i < 0 {
		return "", nil, apistatus.Refuse(errs.ErrNotFound, "template '%.80s' with tag '%.80s' not found", name, ref.Tag)
	}
	from := &have[i]
	own, _ := from.NameAndTag()
	if err := s.checkTags(ctx, namespace, own, tags, all); err != nil {
		return "", nil, err
	}
	if err := s.touch(ctx, from); err != nil {
		return "", nil, err
	}
	for _, tag := range tags {
		if err := s.assign(ctx, from, tag); err != nil {
			return "", nil, err
		}
	}
	s.Log.InfoContext(ctx, "template tags assigned", telemetry.Namespace, namespace, telemetry.Template, own, "tags", tags)
	return from.Labels[barchan.LabelBuild], tags, nil
}

// touch notes that the checkpoint of a template is used, so that it is not collected before another tag refers to it.
func (s *Service) touch(ctx context.Context, t *extensions.SandboxTemplate) error {
	b := t.Spec.Barchan
	if b == nil || b.Sandbox == nil || b.Sandbox.Restore == nil {
		return nil
	}
	key := client.ObjectKey{Namespace: t.Namespace, Name: b.Sandbox.Restore.CheckpointName}
	for try := 1; ; try++ {
		c := &barchan.Checkpoint{}
		err := s.Objects.Get(ctx, key, c)
		if err == nil {
			if c.Annotations == nil {
				c.Annotations = map[string]string{}
			}
			c.Annotations[barchan.AnnotationUsedAt] = barchan.ExactNow()
			err = s.Objects.Update(ctx, c)
		}
		if err == nil {
			failpoint.Reach("tag/used")
			return nil
		}
		if !apierrors.IsConflict(err) || try == maxTries {
			return apistatus.From("note the use of checkpoint "+key.Name, err)
		}
	}
}

// assign has a tag refer to the build of another one.
func (s *Service) assign(ctx context.Context, from *extensions.SandboxTemplate, tag string) error {
	name, _ := from.NameAndTag()
	for try := 1; ; try++ {
		t := &extensions.SandboxTemplate{}
		err := s.Objects.Get(ctx, client.ObjectKey{Namespace: from.Namespace, Name: extensions.TagObject(name, tag)}, t)
		switch {
		case apierrors.IsNotFound(err):
			t = pool.NewTag(from.Namespace, name, tag)
			t.Spec = *from.Spec.DeepCopy()
			pool.SetTag(t, name, tag)
			pool.SetBuild(t, pool.ResultOf(from))
			err = s.Quota.Create(ctx, s.Objects, t)
		case err == nil && t.UID == from.UID:
			return nil
		case err == nil:
			pool.SetBuild(t, pool.ResultOf(from))
			err = s.Objects.Update(ctx, t)
		}
		if err == nil {
			failpoint.Reach("tag/assigned")
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) || try == maxTries {
			return apistatus.From("assign tag "+tag, err)
		}
	}
}

// RemoveTags removes tags of a template. Those that it does not have are ignored.
func (s *Service) RemoveTags(ctx context.Context, namespace, name string, tags []string) error {
	name, _, tagged, err := splitName("name", namespace, name)
	if err != nil {
		return err
	}
	if tagged {
		return apistatus.Refuse(errs.ErrInvalid, "name: must not have a tag; write it in tags")
	}
	if tags, err = cleanTags(tags); err != nil {
		return err
	}
	switch {
	case len(tags) == 0:
		return apistatus.Refuse(errs.ErrInvalid, "tags: must have at least one tag")
	case slices.Contains(tags, barchan.DefaultTag):
		return apistatus.Refuse(errs.ErrInvalid, "tags: cannot delete the 'default' tag; delete the template, or assign the tag to another build")
	}
	have, _, err := s.ofTenant(ctx, namespace, name)
	if err != nil {
		return err
	}
	have = slices.DeleteFunc(have, func(t extensions.SandboxTemplate) bool {
		_, tag := t.NameAndTag()
		return !slices.Contains(tags, tag)
	})
	return s.remove(ctx, have)
}

// Delete deletes a tenant's own template that builds made, or any of its namespace with Applied, and cancels builds of it; with a tag,
// that tag alone. Its sandboxes stay.
func (s *Service) Delete(ctx context.Context, namespace, requested string) error {
	name, tag, tagged, err := splitName("templateID", namespace, requested)
	if err != nil {
		return err
	}
	if tagged {
		if _, err := s.Templates.Get(ctx, namespace, requested); err != nil {
			return err
		}
		return s.RemoveTags(ctx, namespace, name, []string{tag})
	}
	have, _, err := s.ofTenant(ctx, namespace, name)
	if err != nil {
		return err
	}
	if err := s.checkUnused(ctx, have); err != nil {
		return err
	}
	if s.Applied {
		return s.remove(ctx, have)
	}
	own, _ := have[0].NameAndTag()
	all, err := s.buildsOf(ctx, client.ObjectKey{Namespace: namespace, Name: own})
	if err != nil {
		return err
	}
	for i := range all {
		if !all[i].Ended() {
			if err := s.Objects.Delete(ctx, &all[i], client.Preconditions{UID: &all[i].UID}); client.IgnoreNotFound(err) != nil {
				return apistatus.From("cancel template build "+all[i].Name, err)
			}
		}
	}
	return s.remove(ctx, have)
}

// checkUnused refuses to remove tags that a warm pool uses.
func (s *Service) checkUnused(ctx context.Context, tags []extensions.SandboxTemplate) error {
	for i := range tags {
		users, err := s.Cache.PoolsOf(ctx, "", client.ObjectKeyFromObject(&tags[i]))
		if err != nil {
			return fmt.Errorf("list warm pools: %w", err)
		}
		if len(users) > 0 {
			name, tag := tags[i].NameAndTag()
			return apistatus.Refuse(errs.ErrConflict, "the template %q is used by the warm pool %q; delete that first", strings.TrimSuffix(name+":"+tag, ":"+barchan.DefaultTag), users[0].Name)
		}
	}
	return nil
}

// remove deletes the objects of tags, or none if one is used.
func (s *Service) remove(ctx context.Context, tags []extensions.SandboxTemplate) error {
	if err := s.checkUnused(ctx, tags); err != nil {
		return err
	}
	for i := range tags {
		t := &tags[i]
		err := s.Objects.Delete(ctx, t, client.Preconditions{UID: &t.UID})
		if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) { // another of the name is not meant
			return apistatus.From("delete template "+t.Name, err)
		}
		failpoint.Reach("tag/removed")
		s.Log.InfoContext(ctx, "template deleted", telemetry.Namespace, t.Namespace, telemetry.Name, t.Name)
	}
	return nil
}
