package claimsuite

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// queues has a claim wait for the quota for some seconds.
func queues(seconds int) func(*extensions.SandboxClaim) {
	return func(c *extensions.SandboxClaim) {
		c.Annotations = map[string]string{extensions.AnnotationQueueTimeout: fmt.Sprint(seconds)}
	}
}

// one is a quota with room for one sandbox.
func one() quota.Limits { return quota.Limits{Sandboxes: quota.AtMost(1)} }

func (w *fixture) remove(obj client.Object) {
	w.t.Helper()
	must(w.t, w.api.Delete(w.t.Context(), obj))
}

// waiting waits for the number of requests in the queue.
func (w *fixture) waiting(n int) {
	w.t.Helper()
	eventually.True(w.t, fmt.Sprintf("%d requests wait, want %d", w.quotas.Waiting(w.namespace), n), func() bool { return w.quotas.Waiting(w.namespace) == n })
}

// queue has claims and a request of the REST API wait in one order.
func queue(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{limits: one()})
	w.pool(w.template(), 4)
	_, first := w.served(w.claim("first"))
	if waits := pool.WaitsOf(first); waits.Quota != 0 {
		t.Errorf("the first claim notes %+v", waits)
	}
	second := w.claim("second", queues(3600))
	c := w.refused(second, extensions.ReasonQueued, "is number 1 of 1 in the queue, until ")
	if text := ready(c).Message; !strings.Contains(text, "at most 1 sandboxes; 1 are running") ||
		!strings.Contains(text, c.CreationTimestamp.Add(time.Hour).UTC().Format(time.RFC3339)) {
		t.Errorf("message %q", text)
	}
	granted := make(chan *quota.Reservation, 1)
	go func() {
		r, err := w.quotas.Await(t.Context(), quota.Request{Namespace: w.namespace}, eventually.Patience)
		if err != nil {
			t.Errorf("the request between two claims: %v", err)
		}
		granted <- r
	}()
	w.waiting(2)
	third := w.claim("third", queues(3600))
	w.refused(third, extensions.ReasonQueued, "is number 3 of 3 in the queue")
	w.refused(w.claim("other"), extensions.ReasonQuotaExceeded, "at most 1 sandboxes")

	w.remove(first)
	_, s := w.served(second)
	select {
	case <-granted:
		t.Error("the request was granted before the claim's sandbox ended")
	default:
	}
	if waits := pool.WaitsOf(s); waits.Quota <= 0 {
		t.Errorf("the second claim notes %+v, want its wait for the quota", waits)
	}
	w.remove(s)
	(<-granted).Release()
	w.served(third)
	w.waiting(0)
}

// queueWithRoom compares the writes of a claim that may wait, and need not, with those of one that may not.
func queueWithRoom(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{limits: quota.Limits{Sandboxes: quota.AtMost(2)}})
	w.pool(w.template(), 2)
	// The suite's other tests have claims of the same controller in their own namespaces.
	writes := func(of string) (all []string) {
		for _, write := range w.writes.all() {
			if strings.Contains(write, "/"+w.namespace+"/sandboxclaims/"+of) {
				all = append(all, write)
			}
		}
		return all
	}
	w.served(w.claim("plain"))
	w.served(w.claim("queues", queues(60)))
	if plain, queues := writes("plain"), writes("queues"); len(plain) == 0 || len(queues) != len(plain) {
		t.Errorf("writes %v, of a claim that does not queue %v", queues, plain)
	}
	w.waiting(0)
}

func queueTimeout(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{limits: one()})
	w.pool(w.template(), 3)
	_, first := w.served(w.claim("first"))
	c := w.claim("c", queues(5))
	behind := w.claim("behind", queues(3600))
	w.refused(c, extensions.ReasonQueueTimeout, "at most 1 sandboxes; 1 are running; waited 5s in the queue, and was number 1 of ")
	w.waiting(1)
	eventually.True(t, "the controller has recorded the event", func() bool { return slices.Contains(w.events.all(), extensions.ReasonQueueTimeout) })
	w.remove(first)
	_, s := w.served(behind)
	// It comes back by a change of its own only.
	c = w.refused(c, extensions.ReasonQueueTimeout, "raise the annotation barchan.dev/queue-timeout")
	c = update(w, c, queues(3600))
	w.refused(c, extensions.ReasonQueued, "is number 1 of 1")
	update(w, c, func(c *extensions.SandboxClaim) { delete(c.Annotations, extensions.AnnotationQueueTimeout) })
	w.refused(c, extensions.ReasonQuotaExceeded, "at most 1 sandboxes")
	w.waiting(0)
	w.remove(s)
	w.served(c)
}

// queueLeft ends the claims that wait in each way.
func queueLeft(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{limits: one()})
	p := w.pool(w.template(), 3)
	_, first := w.served(w.claim("first"))
	for name, end := range map[string]func(*extensions.SandboxClaim){
		"deleted": func(c *extensions.SandboxClaim) { w.remove(c) },
		"terminating": func(c *extensions.SandboxClaim) {
			update(w, c, func(c *extensions.SandboxClaim) { c.Finalizers = []string{"example.com/test"} })
			w.remove(c)
		},
		"expired": func(c *extensions.SandboxClaim) { update(w, c, ends(extensions.ClaimRetain)) },
		"refused": func(c *extensions.SandboxClaim) {
			update(w, c, func(c *extensions.SandboxClaim) { c.Spec.WarmPoolRef.Name = "none" })
		},
		"replaced": func(c *extensions.SandboxClaim) {
			w.hold()
			w.remove(c)
			w.claim(c.Name)
			w.release()
		},
	} {
		c := w.claim(name, queues(3600))
		w.refused(c, extensions.ReasonQueued, "is number 1 of 1")
		end(c)
		w.waiting(0)
	}
	// One that has waited leaves its room, too, if it gets no sandbox.
	w.nodes.Holding(func(*agents.Sandbox) bool { return true })
	c := w.claim("c", queues(3600), func(c *extensions.SandboxClaim) {
		c.Spec.AdditionalPodMetadata.Labels = map[string]string{"a": "b"}
	})
	w.refused(c, extensions.ReasonQueued, "is number 1 of 1")
	w.remove(p) // the claim's plan is refused from now on
	w.refused(c, extensions.ReasonWarmPoolNotFound, poolName)
	w.nodes.Holding(nil)
	w.remove(first)
	eventually.True(t, "the use of the namespace ends", func() bool { running, _ := w.quotas.Used(w.namespace); return running.Sandboxes == 0 })
}

// queueRestart has the next process serve claims in the order of their creation.
func queueRestart(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{limits: one()})
	w.pool(w.template(), 4)
	_, first := w.served(w.claim("z"))
	var claims []*extensions.SandboxClaim
	for i, name := range []string{"y", "x", "v"} { // not in the order of names
		c := w.claim(name, queues(3600))
		w.refused(c, extensions.ReasonQueued, fmt.Sprintf("is number %d of %d", i+1, i+1))
		eventually.True(t, "the next second begins", func() bool { return time.Now().Unix() > c.CreationTimestamp.Unix() })
		claims = append(claims, c)
	}
	w.stop()
	next := start(t, cfg, options{limits: one(), namespace: w.namespace})
	next.waiting(3)
	next.remove(first)
	for i, c := range claims {
		_, s := next.served(c)
		next.waiting(len(claims) - i - 1)
		for _, later := range claims[i+1:] {
			var now extensions.SandboxClaim
			must(t, next.api.Get(t.Context(), client.ObjectKeyFromObject(later), &now))
			if r := ready(&now); r.Status == metav1.ConditionTrue {
				t.Errorf("claim %s was served before %s", later.Name, c.Name)
			}
		}
		next.remove(s)
	}
}
