package faults

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

var extensionsGroup = extensions.GroupVersion

// history verifies each stored version of sandboxes and claims, and has their last ones.
type history struct {
	tb testing.TB

	mu        sync.Mutex
	sandboxes map[string]*box      // by key; +checklocks:mu
	byID      map[sandbox.ID]*box  // of all times; +checklocks:mu
	claims    map[types.UID]*claim // of all times; +checklocks:mu
	named     map[string]types.UID // claims, by the names of their sandboxes; +checklocks:mu
	claimKeys map[string]*claim    // by key; +checklocks:mu
}

// box is what a sandbox was last.
type box struct {
	name            string
	id              sandbox.ID
	pool            types.UID // of a member
	owner           types.UID // that controls it
	claimedAt       string
	revision        string
	finished, ready bool
	gone            bool
}

// claim is what a SandboxClaim was last.
type claim struct {
	name    string
	uid     types.UID
	sandbox string
	ready   bool
}

func newHistory(tb testing.TB) *history {
	return &history{
		tb: tb, sandboxes: map[string]*box{}, byID: map[sandbox.ID]*box{},
		claims: map[types.UID]*claim{}, named: map[string]types.UID{}, claimKeys: map[string]*claim{},
	}
}

// sawSandbox verifies that a sandbox has at most one owner, of one revision, and does not end.
func (h *history) sawSandbox(key string, object []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if object == nil {
		if b := h.sandboxes[key]; b != nil {
			b.gone = true
		}
		delete(h.sandboxes, key)
		return
	}
	s := &agents.Sandbox{}
	if err := json.Unmarshal(object, s); err != nil {
		h.tb.Errorf("%s: %v", key, err)
		return
	}
	now := &box{
		name: s.Name, id: sandbox.IDOf(s.UID), pool: pool.MemberOf(s), claimedAt: s.Annotations[pool.AnnotationClaimedAt], revision: pool.RevisionOf(s),
		ready: sandbox.PhaseOf(s) == sandbox.Running, finished: meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionFinished),
	}
	if owner := metav1.GetControllerOf(s); owner != nil {
		now.owner = owner.UID
	}
	was := h.byID[now.id]
	if was != nil && was.claimedAt != "" && (was.claimedAt != now.claimedAt || was.owner != now.owner || was.revision != now.revision || now.pool != "") {
		h.tb.Errorf("sandbox %s had an owner, and changed from %+v to %+v", s.Name, *was, *now)
	}
	if now.finished && (was == nil || !was.finished) {
		h.tb.Errorf("sandbox %s ended: %+v", s.Name, s.Status.Conditions)
	}
	h.sandboxes[key], h.byID[now.id] = now, now
}

// sawClaim verifies that a claim has at most one sandbox, which is no other claim's.
func (h *history) sawClaim(key string, object []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if object == nil {
		delete(h.claimKeys, key)
		return
	}
	c := &extensions.SandboxClaim{}
	if err := json.Unmarshal(object, c); err != nil {
		h.tb.Errorf("%s: %v", key, err)
		return
	}
	now := &claim{name: c.Name, uid: c.UID, sandbox: c.Status.Sandbox.Name, ready: meta.IsStatusConditionTrue(c.Status.Conditions, agents.ConditionReady)}
	if was := h.claims[c.UID]; was != nil && was.sandbox != "" && was.sandbox != now.sandbox {
		h.tb.Errorf("claim %s had sandbox %s, and then %q", c.Name, was.sandbox, now.sandbox)
	}
	if other, taken := h.named[now.sandbox]; now.sandbox != "" && taken && other != c.UID {
		h.tb.Errorf("claims %s and %s have sandbox %s", h.claims[other].name, c.Name, now.sandbox)
	}
	if now.sandbox != "" {
		h.named[now.sandbox] = c.UID
	}
	h.claims[c.UID], h.claimKeys[key] = now, now
}

// served returns the sandbox of a claim that is ready, by the claim's name. Names are used once.
func (h *history) served(name string) (*box, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.claimKeys["/registry/"+extensionsGroup.Group+"/sandboxclaims/"+namespace+"/"+name]
	switch {
	case c == nil:
		return nil, fmt.Errorf("claim %s is gone", name)
	case c.sandbox == "" || !c.ready:
		return nil, fmt.Errorf("claim %s is not served: %+v", name, *c)
	}
	b := h.sandboxes["/registry/"+agents.GroupVersion.Group+"/sandboxes/"+namespace+"/"+c.sandbox]
	if b == nil || b.owner != c.uid {
		return nil, fmt.Errorf("claim %s has sandbox %s, which is %+v", name, c.sandbox, b)
	}
	return b, nil
}

// withID returns a sandbox.
func (h *history) withID(id sandbox.ID) (*box, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b := h.byID[id]; b != nil && b.claimedAt != "" {
		return b, nil
	}
	return nil, fmt.Errorf("no sandbox %s has an owner", id)
}

// count counts the sandboxes that exist and are as asked.
func (h *history) count(is func(*box) bool) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.sandboxes {
		if is(b) {
			n++
		}
	}
	return n
}
