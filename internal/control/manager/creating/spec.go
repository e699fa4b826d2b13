package creating

import (
	"cmp"
	"crypto/rand"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

// Adopt implements [claiming.Owner].
func (c *createOp) Adopt(member *agents.Sandbox, t claiming.Template) *agents.Sandbox {
	c.wasOpen = !member.Spec.AgentSecured()
	s := pool.Adopt(member, nil)
	pool.Refresh(s, t.SandboxTemplate)
	c.own(s, sandboxes.Deadline(c.Timeout))
	return s
}

// New implements [claiming.Owner].
func (c *createOp) New(t claiming.Template) *agents.Sandbox {
	s := pool.NewSandbox(t.SandboxTemplate, t.Revision, c.Namespace)
	s.Name = nameLike(t.Name)
	if c.digest != (idempotency.Digest{}) {
		s.Name = c.digest.Name(c.try)
		s.Annotations[idempotency.AnnotationPending] = "true"
	}
	if c.origin != nil {
		c.origin.apply(s)
	}
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
	b.Suspend = cmp.Or(req.Suspend, b.Suspend)
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
