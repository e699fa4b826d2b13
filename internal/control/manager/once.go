package manager

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// AnnotationIdempotencyBody is the hash of the request that a sandbox was made for, beside
// [pool.AnnotationIdempotencyKey].
const AnnotationIdempotencyBody = "barchan.dev/idempotency-body"

// AnnotationIdempotencyPending is "true" beside it on a sandbox that is started for its request, until that is done.
const AnnotationIdempotencyPending = "barchan.dev/idempotency-pending"

// maxIdempotencyKey is in bytes.
const maxIdempotencyKey = 255

// ErrKeyReused says that an idempotency key has been used for another request, whose sandbox
// lives.
var ErrKeyReused = fmt.Errorf("the idempotency key belongs to another request: %w", errs.ErrInvalid)

// mark ties a sandbox to the request that it was made for, by hashes of its key and of the rest.
type requestDigest struct{ key, body string }

func checkKey(key string) error {
	bad := strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' })
	if bad || len(key) > maxIdempotencyKey {
		return apistatus.Refuse(errs.ErrInvalid, "Idempotency-Key: must have from 1 to %d printable ASCII characters", maxIdempotencyKey)
	}
	return nil
}

func digestOf(req *CreateRequest) (requestDigest, error) {
	rest := *req
	rest.IdempotencyKey = ""
	body, err := json.Marshal(&rest) // maps in the order of their keys
	if err != nil {
		return requestDigest{}, fmt.Errorf("hash the request: %w", err)
	}
	return requestDigest{key: digest([]byte(req.IdempotencyKey)), body: digest(body)}, nil
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// name is the name of the sandbox that is started cold for a key, so that of several only one can be
// made. Each try has its own: what died may still have the one before.
func (k requestDigest) name(try int) string {
	sum := sha256.Sum256([]byte(k.key + "/" + strconv.Itoa(try)))
	return "once-" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:15]))
}

// flightKey names an idempotent create that is under way.
type flightKey struct{ namespace, key string }

// inflightCreate is one create that any number of callers wait for.
type inflightCreate struct {
	body string
	done chan struct{}
	// Set before done is closed.
	sandbox *agents.Sandbox
	err     error
}

// createOnce joins the create that is under way for the same key, or is it. Its first caller does
// the work to the end, even if it goes away: the others are not to suffer, and when it asks
// again, it gets the sandbox.
func (m *Manager) createOnce(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	var err error
	if c.digest, err = digestOf(c.CreateRequest); err != nil {
		return nil, err
	}
	at := flightKey{c.Namespace, c.digest.key}
	m.mu.Lock()
	f, flying := m.flights[at]
	if !flying {
		f = &inflightCreate{body: c.digest.body, done: make(chan struct{}), err: errs.ErrUnavailable}
		m.flights[at] = f
	}
	m.mu.Unlock()
	if flying {
		return f.join(ctx, c.digest)
	}
	defer func() {
		m.mu.Lock()
		delete(m.flights, at)
		m.mu.Unlock()
		close(f.done)
	}()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*m.cfg.StartTimeout)
	defer cancel()
	if f.sandbox, f.err = m.madeBefore(ctx, c); f.sandbox == nil && f.err == nil {
		f.sandbox, f.err = m.create(ctx, c)
	}
	return f.sandbox, f.err
}

func (f *inflightCreate) join(ctx context.Context, k requestDigest) (*agents.Sandbox, error) {
	if f.body != k.body {
		return nil, keyReused()
	}
	select {
	case <-f.done:
		return f.sandbox, f.err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the same request: %w: %w", errs.ErrTimeout, ctx.Err())
	}
}

func keyReused() error {
	return apistatus.Refuse(ErrKeyReused, "Idempotency-Key: was used for a different request; send another key")
}

// madeBefore returns the sandbox that lives of the same request, once it is ready; nil if there is
// none.
func (m *Manager) madeBefore(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	found, err := m.cache.SandboxesByIdempotency(ctx, c.Namespace, c.digest.key)
	if err != nil {
		return nil, fmt.Errorf("look up the idempotency key: %w", err)
	}
	found = m.assumed.Merge(found, func(s *agents.Sandbox) bool {
		return s.Namespace == c.Namespace && s.Annotations[pool.AnnotationIdempotencyKey] == c.digest.key
	})
	for i := range found {
		s, err := m.holder(ctx, client.ObjectKeyFromObject(&found[i]), c.digest)
		if err == nil && s != nil {
			s, err = m.again(ctx, c, s)
		}
		if s != nil || err != nil {
			return s, err
		}
	}
	return nil, nil //nolint:nilnil // there is none
}

// of returns a sandbox if it lives and was made for the same request; nil if it does not count.
func (k requestDigest) of(s *agents.Sandbox) (*agents.Sandbox, error) {
	switch {
	case sandbox.DeadForGood(s) || pool.MemberOf(s) != "" || s.Annotations[pool.AnnotationIdempotencyKey] != k.key:
		return nil, nil //nolint:nilnil // it does not count
	case s.Annotations[AnnotationIdempotencyBody] != k.body:
		return nil, keyReused()
	}
	return s, nil
}

// holder returns the sandbox that has a name now, if it was made for the same request.
func (m *Manager) holder(ctx context.Context, key types.NamespacedName, k requestDigest) (*agents.Sandbox, error) {
	s := &agents.Sandbox{}
	err := m.objects.Get(ctx, key, s)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // gone meanwhile
	}
	if err != nil {
		return nil, apistatus.From("read sandbox "+key.String(), err)
	}
	return k.of(s)
}

// again answers a request whose sandbox is there already. If an answer may have been given, the sandbox is its
// owner's, whatever its template has become since: that is what the key means. That is so for a member from its
// adoption on, whose agent may not have heard of it yet, and may hear twice; and for a sandbox started cold from
// the write on by which its create ended. One whose create was cut short before was given to no client: it is
// finished if it fits the template as it is now, and else removed; then the result is nil.
func (m *Manager) again(ctx context.Context, c *createOp, s *agents.Sandbox) (*agents.Sandbox, error) {
	if s.Annotations[AnnotationIdempotencyPending] != "" {
		return m.resumeCreate(ctx, c, s)
	}
	if s.Labels[agents.LabelLaunchType] == agents.LaunchWarm && sandbox.PhaseOf(s) == sandbox.Running && (len(c.Env) > 0 || !c.Secure) {
		if err := m.claims.Bind(ctx, s, envd.InitRequest{EnvVars: c.Env, Open: !c.Secure}); err != nil {
			return nil, err
		}
	}
	m.cfg.Routes.Apply(s)
	return s, nil
}

// resumeCreate ends a create that was cut short, one way or the other.
func (m *Manager) resumeCreate(ctx context.Context, c *createOp, made *agents.Sandbox) (*agents.Sandbox, error) {
	fits, err := m.fits(ctx, c, made)
	if err != nil {
		return nil, err
	}
	if !fits {
		if err := m.remove(ctx, made); err != nil && !errors.Is(err, errs.ErrNotFound) {
			return nil, err
		}
		return nil, nil //nolint:nilnil // there is none any more
	}
	s, err := m.awaitStart(ctx, made)
	if err == nil {
		s, err = m.setShutdownTime(ctx, s, c.Timeout)
	}
	if err != nil {
		m.discard(ctx, made)
		return nil, err
	}
	m.cfg.Routes.Apply(s)
	return s, nil
}

// fits reports whether a sandbox is of the template as it is now. A snapshot does not change.
func (m *Manager) fits(ctx context.Context, c *createOp, s *agents.Sandbox) (bool, error) {
	t, err := m.resolve(ctx, c.Namespace, c.Template)
	if errors.Is(err, errs.ErrNotFound) {
		return pool.RevisionOf(s) == "", nil
	}
	if err != nil {
		return false, err
	}
	_, revision, err := m.cache.CurrentTemplate(ctx, client.ObjectKeyFromObject(t))
	if err != nil {
		return false, fmt.Errorf("read template %s: %w", c.Template, err)
	}
	return pool.Fits(s, revision), nil
}
