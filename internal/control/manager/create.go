package manager

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// MinWakeTimeout is the least time to live of a sandbox that traffic has woken.
const MinWakeTimeout = 5 * time.Minute

// undoTimeout bounds the removal of what a failed create has made.
const undoTimeout = 10 * time.Second

// CreateRequest says what sandbox a tenant wants.
type CreateRequest struct {
	Namespace string
	// Template is a template's name, alias or ID; or a snapshot's ID or name, where no template has it.
	Template string
	// Timeout is the time to live, counted from the moment that the sandbox is ready.
	Timeout  time.Duration
	Env      map[string]string
	Metadata map[string]string
	// Secure makes the agent ask for its token.
	Secure bool
	// OnTimeout, Suspend: empty leaves it to the template.
	OnTimeout agents.TimeoutAction
	Suspend   agents.SuspendMode
	// AutoResume lets traffic wake the sandbox.
	AutoResume bool
	// PublicTraffic: nil leaves it to the template.
	PublicTraffic   *bool
	MaskRequestHost string
	// Network: nil leaves it to the template.
	Network *agents.EgressPolicy
	// FilesOnly leaves out a snapshot's memory. AllowSecrets starts from one that holds what the claim of its
	// source brought. Neither means anything for a template.
	FilesOnly    bool `json:",omitempty"`
	AllowSecrets bool `json:",omitempty"`
	// IdempotencyKey makes it safe to send the request again: from 1 to 255 printable ASCII
	// characters, the tenant's own choice. Empty: each request makes a sandbox.
	IdempotencyKey string
}

// Create makes a sandbox and returns once it is ready: a warm member of a pool if there is one,
// else one started for it, or from a snapshot. If it does not become ready, nothing of it is left and the error says
// why. One that a quota forbids is an errs.ErrExhausted; one that the gate refuses an errs.ErrUnavailable.
//
// With an IdempotencyKey it returns the sandbox that lives of the same request made before, if
// there is one; the same key on another request is an [ErrKeyReused]. It then goes on to its end
// even if ctx is done.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (_ Sandbox, err error) {
	start := time.Now()
	defer func() { m.observe(opCreate, start, err) }()
	if err := m.checkCreate(&req); err != nil {
		return Sandbox{}, err
	}
	create := m.createOnce
	if req.IdempotencyKey == "" {
		create = m.create
	}
	s, err := create(ctx, &createOp{m: m, CreateRequest: &req, start: start})
	if err != nil {
		return Sandbox{}, err
	}
	return m.view(s), nil
}

func (m *Manager) create(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	if err := m.cfg.Gate.Err(); err != nil {
		return nil, err
	}
	s, err := m.obtain(ctx, c)
	if err != nil {
		return nil, err
	}
	m.cfg.Routes.Apply(s)
	failpoint.Reach("create/routed")
	m.log.InfoContext(ctx, "sandbox created", telemetry.Sandbox, sandbox.IDOf(s.UID), telemetry.Namespace, s.Namespace,
		telemetry.Name, s.Name, telemetry.Template, c.Template, telemetry.Duration, time.Since(c.start))
	return s, nil
}

// obtain finds what the sandbox is to be made of, and makes or takes it.
func (m *Manager) obtain(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	t, err := m.resolve(ctx, c.Namespace, c.Template)
	if err == nil {
		return m.take(ctx, c, client.ObjectKeyFromObject(t))
	}
	if !errors.Is(err, errs.ErrNotFound) {
		return nil, err
	}
	snap, other := m.snapshot(ctx, c.Namespace, c.Template)
	if errors.Is(other, errs.ErrNotFound) {
		return nil, err
	}
	if other == nil {
		other = m.from(ctx, c, snap)
	}
	if other != nil {
		return nil, other
	}
	return m.takeCold(ctx, c)
}

func (m *Manager) checkCreate(req *CreateRequest) error {
	if req.Template == "" {
		return apistatus.Refuse(errs.ErrInvalid, "templateID: must name a template")
	}
	if err := m.checkTimeout(req.Timeout); err != nil {
		return err
	}
	if err := checkEnv(req.Env); err != nil {
		return err
	}
	if err := checkKey(req.IdempotencyKey); err != nil {
		return err
	}
	if req.PublicTraffic != nil && !*req.PublicTraffic && !req.Secure {
		return apistatus.Refuse(errs.ErrInvalid, "network.allowPublicTraffic: false needs a secure sandbox; set secure to true")
	}
	if req.AutoResume && req.Suspend == agents.SuspendFiles {
		return apistatus.Refuse(errs.ErrInvalid, "autoResume: needs the memory to be kept; set autoPauseMemory to true")
	}
	return checkNetwork(req.Network)
}

func checkEnv(env map[string]string) error {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return apistatus.Refuse(errs.ErrInvalid, "envVars: %q is not a variable's name, or its value has a zero byte", name)
		}
	}
	return nil
}

func checkNetwork(n *agents.EgressPolicy) error {
	if n == nil {
		return nil
	}
	return apistatus.InvalidFields(agents.ValidateEgress(n, field.NewPath("network")))
}

func (m *Manager) checkTimeout(d time.Duration) error {
	if d <= 0 {
		return apistatus.Refuse(errs.ErrInvalid, "Timeout must be greater than 0")
	}
	if d > m.cfg.MaxTimeout {
		return apistatus.Refuse(errs.ErrInvalid, "Timeout cannot be greater than %g hours", m.cfg.MaxTimeout.Hours())
	}
	return nil
}

// make creates a sandbox of the template as it is now. joined reports that an earlier create of the same
// request has made it, and that it is complete.
func (m *Manager) make(ctx context.Context, c *createOp) (s *agents.Sandbox, joined bool, err error) {
	const tries = 4
	for c.try = 1; ; c.try++ {
		s, err := c.claim.Create(ctx, true)
		if err == nil {
			failpoint.Reach("create/written")
			return s, false, nil
		}
		if s == nil {
			return nil, false, err
		}
		if apierrors.IsNotFound(err) {
			return nil, false, errs.Public(apistatus.From("create sandbox", err), fmt.Sprintf("the team's namespace %q does not exist", c.Namespace))
		}
		if !apierrors.IsAlreadyExists(err) || c.try == tries {
			return nil, false, apistatus.From("create sandbox", err)
		}
		if c.digest == (requestDigest{}) {
			continue
		}
		other, err := m.holder(ctx, client.ObjectKeyFromObject(s), c.digest)
		if err == nil && other != nil {
			other, err = m.again(ctx, c, other)
		}
		if other != nil || err != nil {
			return other, true, err
		}
	}
}

// own writes what the create asks for into a new sandbox or a member.
func (c *createOp) own(s *agents.Sandbox, end *metav1.Time) {
	s.Labels[agents.LabelCreatedBy] = CreatedBy
	s.Spec.ShutdownTime = end
	s.Spec.Barchan = c.m.barchanSpec(s.Spec.Barchan, c.CreateRequest)
	if len(s.Spec.PodTemplate.Spec.Containers) > 0 {
		addEnv(&s.Spec.PodTemplate.Spec.Containers[0], c.Env)
	}
	if len(c.Env) > 0 {
		pool.BindEnv(s, true)
	}
	if s.Annotations[pool.AnnotationClaimedAt] == "" {
		s.Annotations[pool.AnnotationClaimedAt] = exactly()
	}
	if c.digest != (requestDigest{}) {
		s.Annotations[pool.AnnotationIdempotencyKey] = c.digest.key
		s.Annotations[AnnotationIdempotencyBody] = c.digest.body
	}
	agents.SetDefaults(s)
}

// firstDeadline leaves a sandbox with a short life the time that it may take to start.
func (m *Manager) firstDeadline(timeout time.Duration) *metav1.Time {
	if timeout <= m.cfg.StartTimeout {
		timeout += m.cfg.StartTimeout
	}
	return deadline(timeout)
}

// deadline is a duration from now, rounded up to the second, which is all that objects keep.
func deadline(d time.Duration) *metav1.Time {
	at := metav1.NewTime(time.Now().Add(d + time.Second - 1).Truncate(time.Second))
	return &at
}

// barchanSpec is what the template asks for, nil for nothing, changed by what the request does.
func (m *Manager) barchanSpec(template *agents.BarchanSpec, req *CreateRequest) *agents.BarchanSpec {
	b := template.DeepCopy()
	if b == nil {
		b = &agents.BarchanSpec{}
	}
	if len(req.Metadata) > 0 {
		if b.Metadata == nil {
			b.Metadata = map[string]string{}
		}
		maps.Copy(b.Metadata, req.Metadata)
	}
	if req.OnTimeout != "" {
		b.OnTimeout = req.OnTimeout
	}
	if req.Suspend != "" {
		b.Suspend = req.Suspend
	}
	if b.Wake == nil {
		b.Wake = &agents.WakePolicy{}
	}
	b.Wake.OnTraffic = b.Wake.OnTraffic || req.AutoResume
	b.Wake.TimeoutSeconds = int32(m.wakeTimeout(req.Timeout) / time.Second)
	if b.Access == nil {
		b.Access = &agents.AccessPolicy{}
	}
	b.Access.OpenAgent = !req.Secure
	if req.PublicTraffic != nil {
		b.Access.PublicTraffic = req.PublicTraffic
	}
	if req.MaskRequestHost != "" {
		b.Access.MaskRequestHost = req.MaskRequestHost
	}
	if req.Network != nil {
		b.Network = req.Network.DeepCopy()
	}
	return b
}

// addEnv sets variables in the order of their names; what the template sets is replaced. Values
// mean themselves: whoever reads a container's environment would expand "$(NAME)".
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

// nameLike makes up an object's name that begins as the template's.
func nameLike(template string) string {
	const room = 40
	if len(template) > room {
		template = template[:room]
	}
	template = strings.Trim(strings.NewReplacer(".", "-", "_", "-").Replace(template), "-")
	return template + "-" + strings.ToLower(rand.Text()[:10])
}

// awaitStart waits until a new sandbox is ready, or cannot become so.
func (m *Manager) awaitStart(ctx context.Context, made *agents.Sandbox) (*agents.Sandbox, error) {
	bounded, cancel := context.WithTimeout(ctx, m.cfg.StartTimeout)
	defer cancel()
	id, waitingFor := sandbox.IDOf(made.UID), ""
	ready, err := m.cache.WaitSandbox(bounded, client.ObjectKeyFromObject(made), func(s *agents.Sandbox) (bool, error) {
		if s == nil || s.UID != made.UID {
			return false, killed(id)
		}
		if reason, message, failed := sandbox.Failure(s); failed {
			return false, apistatus.Refuse(errs.ErrInvalid, "the sandbox cannot start: %s: %s", reason, message)
		}
		if sandbox.DeadForGood(s) {
			return false, killed(id)
		}
		if err := heldUp(s); err != nil {
			return false, err
		}
		if err := m.cfg.Gate.Err(); err != nil && sandbox.PhaseOf(s) != sandbox.Running && troubled(s) {
			return false, err // the node would go on trying, and wait for this to pass
		}
		waitingFor = readyMessage(s)
		return sandbox.PhaseOf(s) == sandbox.Running, nil
	})
	if refused := m.cfg.Gate.Err(); refused != nil && errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, fmt.Errorf("wait for the start of sandbox %s: %w", id, refused)
	}
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, errs.Public(err, fmt.Sprintf("the sandbox was not ready within %s%s", m.cfg.StartTimeout, waitingFor))
	}
	if err != nil {
		return nil, fmt.Errorf("wait for the start of sandbox %s: %w", id, err)
	}
	return ready, nil
}

// heldUp is why a sandbox does not start that would be started later, for which nobody waits.
func heldUp(s *agents.Sandbox) error {
	if message, lacks := sandbox.LacksImage(s); lacks {
		return apistatus.Refuse(errs.ErrUnavailable, "the sandbox cannot start: %s", message)
	}
	if message, refused := sandbox.RefusedSecrets(s); refused {
		return apistatus.Refuse(errs.ErrForbidden, "the sandbox cannot start: %s", message)
	}
	return nil
}

func killed(id sandbox.ID) error {
	return apistatus.Refuse(errs.ErrConflict, "Sandbox %q was killed while it was starting", id)
}

// troubled reports whether the last try to make a sandbox run has failed.
func troubled(s *agents.Sandbox) bool {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	return c != nil && c.Reason == agents.ReasonReconcilerError
}

// readyMessage says what a sandbox waits for, as its controller tells it.
func readyMessage(s *agents.Sandbox) string {
	for _, c := range s.Status.Conditions {
		if c.Type == agents.ConditionReady && c.Status != metav1.ConditionTrue && c.Message != "" {
			return ": " + c.Reason + ": " + c.Message
		}
	}
	return ""
}

// setShutdownTime sets the end of a sandbox that has become ready, unless what stands there is
// right to the second, and notes that its create is complete where that is asked for.
func (m *Manager) setShutdownTime(ctx context.Context, ready *agents.Sandbox, timeout time.Duration) (*agents.Sandbox, error) {
	end := deadline(timeout)
	set, err := m.changeObject(ctx, ready, func(s *agents.Sandbox) (changed bool, err error) {
		_, changed = s.Annotations[AnnotationIdempotencyPending]
		delete(s.Annotations, AnnotationIdempotencyPending)
		was := s.Spec.ShutdownTime
		if s.Spec.OperatingMode != agents.ModeSuspended && (was == nil || end.Sub(was.Time).Abs() > time.Second) {
			s.Spec.ShutdownTime, changed = end, true
		}
		return changed, nil
	})
	if errors.Is(err, errs.ErrNotFound) {
		return nil, killed(sandbox.IDOf(ready.UID))
	}
	return set, err
}

// discard removes what a failed create has made, even if the caller has gone away.
func (m *Manager) discard(ctx context.Context, made *agents.Sandbox) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := m.remove(ctx, made); err != nil && !errors.Is(err, errs.ErrNotFound) {
		m.log.WarnContext(ctx, "sandbox that did not start could not be removed; its timeout will end it",
			telemetry.Sandbox, sandbox.IDOf(made.UID), telemetry.Namespace, made.Namespace, telemetry.Name, made.Name, telemetry.Error, err)
	}
}
