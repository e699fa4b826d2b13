package creating

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
)

// Adopt implements [claiming.Owner].
func (c *createOp) Adopt(member *agents.Sandbox, t claiming.Template) *agents.Sandbox {
	c.wasOpen = !member.Spec.AgentSecured()
	s := pool.Adopt(member, nil)
	pool.Refresh(s, t.SandboxTemplate)
	c.own(s, sandboxes.Deadline(c.Timeout))
	return s
}

// Binds implements [claiming.Owner].
func (c *createOp) Binds() bool { return len(c.Env) > 0 || c.Secure == c.wasOpen }

// New implements [claiming.Owner].
func (c *createOp) New(t claiming.Template) *agents.Sandbox {
	s := pool.NewSandbox(t.SandboxTemplate, t.Revision, c.Namespace)
	s.Name = nameLike(t.Name)
	if c.digest != (idempotency.Digest{}) {
		s.Name = c.digest.Name(c.try)
	}
	s.Annotations[pool.AnnotationPending] = "true"
	if c.origin != nil {
		c.origin.apply(s)
	}
	volumes.AddMounts(&s.Spec.PodTemplate.Spec, c.mounts)
	if len(c.pools) > 0 {
		s.Labels[pool.LabelOrigin] = string(c.pools[0].UID)
	}
	timeout := c.Timeout
	if timeout <= c.cr.StartTimeout { // a short life begins after the start
		timeout += c.cr.StartTimeout
	}
	c.own(s, sandboxes.Deadline(timeout))
	return s
}

// own writes the request into a new sandbox or a member.
func (c *createOp) own(s *agents.Sandbox, end *metav1.Time) {
	s.Labels[agents.LabelCreatedBy] = sandboxes.CreatedBy
	s.Spec.ShutdownTime = end
	s.Spec.Barchan = c.barchanSpec(s.Spec.Barchan)
	if len(s.Spec.PodTemplate.Spec.Containers) > 0 {
		addEnv(&s.Spec.PodTemplate.Spec.Containers[0], c.Env)
	}
	if len(c.Env) > 0 {
		pool.BindEnv(s, true)
	}
	if s.Annotations[pool.AnnotationClaimedAt] == "" {
		s.Annotations[pool.AnnotationClaimedAt] = barchan.ExactNow()
	}
	if c.Key != "" {
		s.Annotations[pool.AnnotationCreatedByKey] = c.Key
	}
	c.digest.Mark(s)
	agents.SetDefaults(s)
}

// barchanSpec is the template's, or nil, changed by the request.
func (c *createOp) barchanSpec(template *agents.BarchanSpec) *agents.BarchanSpec {
	b, req := cmp.Or(template.DeepCopy(), &agents.BarchanSpec{}), c.Request
	if len(req.Metadata) > 0 {
		if b.Metadata == nil {
			b.Metadata = map[string]string{}
		}
		maps.Copy(b.Metadata, req.Metadata)
	}
	b.OnTimeout = cmp.Or(req.OnTimeout, b.OnTimeout)
	if b.Suspend = cmp.Or(req.Suspend, b.Suspend); req.Suspend == agents.SuspendFiles {
		b.Suspend = c.cr.Sandboxes.WithoutMemory()
	}
	b.Wake = cmp.Or(b.Wake, &agents.WakePolicy{})
	b.Wake.OnTraffic = b.Wake.OnTraffic || req.AutoResume
	b.Wake.TimeoutSeconds = int32(c.cr.Sandboxes.WakeTimeout(req.Timeout) / time.Second)
	b.Access = cmp.Or(b.Access, &agents.AccessPolicy{})
	b.Access.OpenAgent = !req.Secure
	b.Access.PublicTraffic = cmp.Or(req.PublicTraffic, b.Access.PublicTraffic)
	b.Access.MaskRequestHost = cmp.Or(req.MaskRequestHost, b.Access.MaskRequestHost)
	b.Network = cmp.Or(req.Network.DeepCopy(), b.Network)
	return b
}

// checkAccess refuses an open agent where the template, or a snapshot's sandbox, closes traffic: any client could run
// commands there, and so reach what is closed.
func (c *createOp) checkAccess(from *agents.BarchanSpec) error {
	if c.Secure || c.PublicTraffic != nil || from.Access == nil || from.Access.PublicTraffic == nil || *from.Access.PublicTraffic {
		return nil
	}
	return apistatus.Refuse(errs.ErrInvalid, "secure: false is refused, because the traffic of %q is not public; leave secure out", c.Template)
}

func checkEnv(env map[string]string) error {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return apistatus.Refuse(errs.ErrInvalid, "envVars: %q is not a variable's name, or its value has a zero byte", name)
		}
	}
	return nil
}

// addEnv sets variables in the order of their names, and replaces the template's. It escapes "$(NAME)" in values,
// which the readers of a container's environment expand.
func addEnv(c *corev1.Container, env map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		v := corev1.EnvVar{Name: name, Value: strings.ReplaceAll(env[name], "$", "$$")}
		if i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == name }); i >= 0 {
			c.Env[i] = v
		} else {
			c.Env = append(c.Env, v)
		}
	}
}

// nameLike returns a new object name that begins with a template's.
func nameLike(template string) string {
	template = template[:min(len(template), 40)]
	template = strings.Trim(strings.NewReplacer(".", "-", "_", "-").Replace(template), "-")
	return template + "-" + strings.ToLower(rand.Text()[:10])
}

// origin is the checkpoint that a create's sandbox starts from, and what it inherits from the checkpoint's source.
type origin struct {
	restore  agents.RestoreSource
	shutdown agents.ShutdownPolicy
	// template, templateName, templateID and templateNamespace are empty for a source without a template.
	template, templateName, templateID, templateNamespace string
	// forkedFrom is the ID of a fork's source.
	forkedFrom string
	// secrets reports that the source was created with variables, own that all of them are the tenant's own.
	secrets, own bool
}

// from has a create start its sandbox from a snapshot.
func (cr *Creator) from(ctx context.Context, c *createOp, snap *barchan.Checkpoint) (err error) {
	if err := cr.Sandboxes.CheckCheckpoints(); err != nil {
		return err
	}
	if snap.Status.Phase != barchan.CheckpointReady {
		if snap, err = cr.Snapshots.Await(ctx, snap, cr.StartTimeout); err != nil {
			return err
		}
	}
	from := snap.Status.Source
	if from == nil || len(from.Blueprint.Raw) == 0 {
		return apistatus.Refuse(errs.ErrConflict, "snapshot %q has no blueprint of its sandbox; take a new one", snap.SnapshotID())
	}
	var blueprint agents.SandboxBlueprint
	var policies agents.BarchanSpec
	err = json.Unmarshal(from.Blueprint.Raw, &blueprint)
	if len(from.Policies.Raw) > 0 {
		err = errors.Join(err, json.Unmarshal(from.Policies.Raw, &policies))
	}
	if err != nil {
		return errs.Public(fmt.Errorf("read checkpoint %s/%s: %w: %w", snap.Namespace, snap.Name, errs.ErrConflict, err),
			fmt.Sprintf("the blueprint in snapshot %q cannot be read", snap.SnapshotID()))
	}
	o := &origin{
		restore:  agents.RestoreSource{CheckpointName: snap.Name, FilesOnly: c.FilesOnly},
		shutdown: agents.ShutdownDelete,
		template: from.TemplateName, templateID: from.TemplateID, templateNamespace: from.TemplateNamespace,
		secrets: from.Secrets, own: from.OwnVariables,
	}
	if err := cr.mayShare(o, &policies, c.AllowSecrets, fmt.Sprintf("snapshot %q", snap.SnapshotID())); err != nil {
		return err
	}
	if err := errors.Join(c.checkAccess(&policies), cr.checkVolumes(ctx, c.Namespace, &blueprint), c.checkMountable(&blueprint, &o.restore)); err != nil {
		return err
	}
	name, _ := snap.SnapshotName()
	c.startFrom(o, &blueprint, &policies, cmp.Or(from.TemplateName, name))
	return nil
}

// checkVolumes refuses a blueprint that mounts a volume which is gone.
func (cr *Creator) checkVolumes(ctx context.Context, namespace string, b *agents.SandboxBlueprint) error {
	if cr.Volumes == nil {
		return nil
	}
	return cr.Volumes.CheckPod(ctx, namespace, &b.PodTemplate.Spec)
}

// startFrom has a create make its sandbox by the blueprint and the policies of another.
func (c *createOp) startFrom(o *origin, blueprint *agents.SandboxBlueprint, policies *agents.BarchanSpec, like string) {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: like}}
	t.Spec.SandboxBlueprint = *blueprint
	t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: policies}
	policies.Metadata, policies.Resume, policies.Restore = nil, "", nil
	c.origin = o
	c.claim = c.cr.Claims.BeginFrom(t, c.Namespace, c)
}

// apply makes a sandbox start from the checkpoint.
func (o *origin) apply(s *agents.Sandbox) {
	delete(s.Labels, agents.LabelTemplateHash) // it runs the captured revision, not the template's present one
	for name, value := range map[string]string{
		agents.AnnotationTemplateRef: o.template, pool.AnnotationTemplateName: o.templateName, pool.AnnotationTemplateID: o.templateID, pool.AnnotationTemplateNamespace: o.templateNamespace,
		pool.AnnotationForkedFrom: o.forkedFrom,
	} {
		if s.Annotations[name] = value; value == "" {
			delete(s.Annotations, name)
		}
	}
	if o.secrets { // mayShare has allowed it
		pool.BindEnv(s, o.own)
		s.Annotations[pool.AnnotationAllowSecrets] = "true"
	}
	s.Spec.ShutdownPolicy = o.shutdown
	s.Spec.Barchan = cmp.Or(s.Spec.Barchan, &agents.BarchanSpec{})
	s.Spec.Barchan.Restore = &o.restore
}

// mayShare refuses to pass on variables that are not the tenant's own, unless the source, the request or the
// server allows it; see package pool.
func (cr *Creator) mayShare(o *origin, source *agents.BarchanSpec, allowed bool, what string) error {
	if !o.secrets || o.own || allowed || cr.ForkSecrets || sandbox.HandsOnSecrets(source) {
		return nil
	}
	return apistatus.Refuse(errs.ErrForbidden, "%s holds environment variables that a SandboxClaim brought, and another sandbox would get them; "+
		"allow it by allowSecrets in the request, by spec.barchan.fork.secrets: Allow of the sandbox or its template, or for all by the server's setting forkSecrets", what)
}
