package e2b_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// crowdTeam is one namespace.
type crowdTeam struct {
	*crowd
	name  string
	waves int
	rest  *client.Client
	// done counts its requests with a sandbox.
	done atomic.Int64
	// othersAtEnd is how many the others have served when all of these are done.
	othersAtEnd atomic.Int64

	// Fields stand alone: checklocks takes another for mu where an earlier line has two.
	mu      sync.Mutex
	holders []string          // +checklocks:mu
	ids     map[string]string // the requests by the IDs of their sandboxes; +checklocks:mu
	order   []int             // waves of requests, in the order of the answers; +checklocks:mu
	claims  []time.Time       // creations of claims, in the order in which they were served; +checklocks:mu
}

// team makes a namespace for so many waves.
func (c *crowd) team(name string, waves int) *crowdTeam {
	c.t.Helper()
	ctx, key := c.t.Context(), barchan.NewKeySecret()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{quota.AnnotationSandboxes: strconv.Itoa(slots)}}}
	for _, obj := range []kube.Object{
		namespace, fakecluster.Template(name, "base", "base"), fakecluster.Pool(name, "pool", "", "base"),
		&barchan.APIKey{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "key"}, Spec: barchan.NewAPIKeySpec(key, "")},
	} {
		if err := c.objects().Create(ctx, obj); err != nil {
			c.t.Fatal(err)
		}
	}
	rest, err := client.New(client.Config{URL: c.url, Key: key, HTTP: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2 * slots}}})
	if err != nil {
		c.t.Fatal(err)
	}
	x := &crowdTeam{crowd: c, name: name, waves: waves, rest: rest, ids: map[string]string{}}
	c.teams = append(c.teams, x)
	return x
}

// requests is how many sandboxes the team asks for, and waits for, after its room is full.
func (x *crowdTeam) requests() int { return x.waves * (wave + claimsOfWave) }

// fill takes all the room.
func (x *crowdTeam) fill() {
	x.t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	for range slots {
		made, err := x.rest.Create(x.t.Context(), client.CreateOptions{TemplateID: "base", Timeout: time.Hour})
		if err != nil {
			x.t.Fatal(err)
		}
		x.holders = append(x.holders, made.SandboxID)
	}
}

// refusedAtOnce makes requests that do not wait. The errors tell apart what the client, the namespace and the server are to blame for.
func (x *crowdTeam) refusedAtOnce() {
	x.t.Helper()
	for what, refused := range map[string]struct {
		options client.CreateOptions
		kind    error
		text    string
	}{
		"no room":          {client.CreateOptions{}, client.ErrRateLimited, "at most 50 sandboxes; 50 are running"},
		"no such template": {client.CreateOptions{TemplateID: "none", QueueTimeout: patience}, client.ErrNotFound, "none"},
		"a wrong request":  {client.CreateOptions{QueueTimeout: 1000 * time.Hour}, client.ErrInvalid, "Barchan-Queue-Timeout: want from 0 to 86400 seconds"},
	} {
		_, err := x.rest.Create(x.t.Context(), refused.options)
		if !errors.Is(err, refused.kind) || !regexp.MustCompile(refused.text).MatchString(err.Error()) {
			x.t.Errorf("%s: %v", what, err)
		}
	}
}

// enqueue sends all requests, wave by wave, and returns when they wait.
func (x *crowdTeam) enqueue() {
	x.t.Helper()
	for w := range x.waves {
		for i := range wave {
			x.clients.Go(func() { x.request(w, i) })
		}
		for i := range claimsOfWave {
			c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{
				Namespace: x.name, Name: fmt.Sprintf("claim-%d-%d", w, i),
				Annotations: map[string]string{extensions.AnnotationQueueTimeout: strconv.Itoa(int(patience.Seconds()))},
			}}
			c.Spec.WarmPoolRef.Name = "pool"
			if err := x.objects().Create(x.t.Context(), c); err != nil {
				x.t.Fatal(err)
			}
		}
		want := (w + 1) * (wave + claimsOfWave)
		eventually.True(x.t, fmt.Sprintf("%d requests wait", want), func() bool { return x.ask("waiting", x.name) == want })
	}
	x.clients.Go(x.takeClaims)
}

// request asks for a sandbox until it gets one, and ends it.
func (x *crowdTeam) request(w, i int) {
	key := fmt.Sprintf("%s-%d-%d", x.name, w, i)
	var twin sync.WaitGroup
	var other string
	if i < twinsOfWave {
		twin.Go(func() { other = x.create(key) })
	}
	id := x.create(key)
	twin.Wait()
	if id == "" {
		return
	}
	if other != "" && other != id {
		x.t.Errorf("request %s got the sandboxes %s and %s", key, id, other)
	}
	x.take(key, id, func() { x.order = append(x.order, w) })
	x.end(id)
}

// create repeats a request until it is answered. It returns "" after it has reported a refusal, and at the end of the test.
func (x *crowdTeam) create(key string) string {
	for x.t.Context().Err() == nil {
		made, err := x.rest.Create(x.t.Context(), client.CreateOptions{TemplateID: "base", Timeout: time.Hour, QueueTimeout: patience, IdempotencyKey: key})
		switch status := (*client.Error)(nil); {
		case err == nil:
			return made.SandboxID
		case errors.As(err, &status) && !errors.Is(err, client.ErrUnavailable):
			x.t.Errorf("request %s: %d %v", key, status.Status, err)
			return ""
		}
		x.fault()
	}
	return ""
}

// take notes that a request has a sandbox.
func (x *crowdTeam) take(request, id string, note func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if before, taken := x.ids[id]; taken {
		x.t.Errorf("the requests %s and %s got sandbox %s", before, request, id)
	}
	x.ids[id] = request
	note()
	x.served.Add(1)
	if x.done.Add(1) == int64(x.requests()) {
		others := x.served.Load() - int64(x.requests())
		x.othersAtEnd.Store(others)
	}
}

// end ends a sandbox.
func (x *crowdTeam) end(id string) {
	for x.t.Context().Err() == nil {
		err := x.rest.Kill(x.t.Context(), id)
		if err == nil || errors.Is(err, client.ErrNotFound) {
			return
		}
		x.fault()
	}
}

// expire has more requests wait for a second, behind all others.
func (x *crowdTeam) expire() {
	refusal := regexp.MustCompile(`^quota of the namespace: at most 50 sandboxes; 50 are running; waited [\d.]+m?s in the queue, and was number (\d+) of (\d+)$`)
	var all sync.WaitGroup
	for range x.waves * impatientOfWave {
		all.Go(func() {
			_, err := x.rest.Create(x.t.Context(), client.CreateOptions{TemplateID: "base", QueueTimeout: time.Second})
			if !errors.Is(err, client.ErrRateLimited) {
				x.t.Errorf("a request that waits for a second: %v", err)
				return
			}
			text := refusal.FindStringSubmatch(err.Error())
			if text == nil {
				x.t.Errorf("a request that waits for a second: %v", err)
				return
			}
			if at, _ := strconv.Atoi(text[1]); at <= x.requests() {
				x.t.Errorf("a request behind %d others: %v", x.requests(), err)
			}
		})
	}
	all.Wait()
	late := &extensions.SandboxClaim{}
	if err := x.objects().Get(x.t.Context(), kube.ObjectKey{Namespace: x.name, Name: fmt.Sprintf("claim-%d-0", x.waves-1)}, late); err != nil {
		x.t.Error(err)
		return
	}
	ready := meta.FindStatusCondition(late.Status.Conditions, agents.ConditionReady)
	if ready == nil || ready.Reason != extensions.ReasonQueued || !regexp.MustCompile(`^is number \d+ of \d+ in the queue, until 20`).MatchString(ready.Message) {
		x.t.Errorf("a claim that waits has the condition %+v", ready)
	}
}

// release ends the sandboxes that take all the room.
func (x *crowdTeam) release() {
	x.mu.Lock()
	holders := x.holders
	x.mu.Unlock()
	var all sync.WaitGroup
	for _, id := range holders {
		all.Go(func() { x.end(id) })
	}
	all.Wait()
}

// takeClaims deletes each claim once it has its sandbox, until none is left.
func (x *crowdTeam) takeClaims() {
	seen := map[string]bool{}
	for x.t.Context().Err() == nil {
		var list extensions.SandboxClaimList
		err := x.objects().List(x.t.Context(), &list, kube.InNamespace(x.name))
		if err == nil && len(list.Items) == 0 {
			return
		}
		for i := range list.Items {
			x.takeClaim(&list.Items[i], seen)
		}
		ctx, cancel := context.WithTimeout(x.t.Context(), 5*time.Second)
		events, failed := x.objects().Watch(ctx, &list, kube.InNamespace(x.name), &kube.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
		if err = errors.Join(err, failed); err != nil {
			cancel()
			x.fault()
			continue
		}
		for e := range events.ResultChan() {
			if c, is := e.Object.(*extensions.SandboxClaim); is && e.Type == watch.Modified {
				x.takeClaim(c, seen)
			}
		}
		cancel()
	}
}

func (x *crowdTeam) takeClaim(c *extensions.SandboxClaim, seen map[string]bool) {
	if !meta.IsStatusConditionTrue(c.Status.Conditions, agents.ConditionReady) || c.DeletionTimestamp != nil {
		return
	}
	if !seen[c.Name] {
		var box agents.Sandbox
		switch err := x.objects().Get(x.t.Context(), kube.ObjectKey{Namespace: c.Namespace, Name: c.Status.Sandbox.Name}, &box); {
		case apierrors.IsNotFound(err):
			x.t.Errorf("claim %s is ready, and its sandbox %s does not exist", c.Name, c.Status.Sandbox.Name)
		case err != nil: // again by the next list
			x.fault()
			return
		default:
			x.take(c.Name, string(sandbox.IDOf(box.UID)), func() { x.claims = append(x.claims, c.CreationTimestamp.Time) })
		}
		seen[c.Name] = true
	}
	if err := x.objects().Delete(x.t.Context(), c); err != nil && !apierrors.IsNotFound(err) { // again by the next list
		x.fault()
	}
}

// fault notes an error that is the server's, and waits a moment.
func (x *crowdTeam) fault() {
	x.faults.Add(1)
	select {
	case <-time.After(50 * time.Millisecond):
	case <-x.t.Context().Done():
	}
}

// checkFull compares the largest number of sandboxes with the room, which has been full.
func (x *crowdTeam) checkFull() {
	x.t.Helper()
	if most := x.ask("most", x.name); most != slots {
		x.t.Errorf("%s: at most %d sandboxes were live at once before the server ended, want %d", x.name, most, slots)
	}
}

// checkOrder compares the order of the answers with that of the requests.
func (x *crowdTeam) checkOrder(when string) {
	x.t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	if n := mostOvertakers(x.order, func(a, b int) bool { return a > b }); n > overtakers {
		x.t.Errorf("%s: %s: %d later requests were answered before one, of %d", x.name, when, n, len(x.order))
	}
	if n := mostOvertakers(x.claims, time.Time.After); n > overtakers {
		x.t.Errorf("%s: %s: %d later claims were served before one, of %d", x.name, when, n, len(x.claims))
	}
}

// forgetOrder: requests that are repeated are in a new order. Claims keep theirs.
func (x *crowdTeam) forgetOrder() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.order = nil
}

// mostOvertakers returns the largest number of later items before one.
func mostOvertakers[T any](order []T, later func(a, b T) bool) (most int) {
	for i, x := range order {
		n := 0
		for _, before := range order[:i] {
			if later(before, x) {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// checkEnd checks what is left when all requests have been served.
func (x *crowdTeam) checkEnd() {
	x.t.Helper()
	x.mu.Lock()
	ids := len(x.ids)
	if n := mostOvertakers(x.claims, time.Time.After); n > overtakers {
		x.t.Errorf("%s: %d later claims were served before one, of %d", x.name, n, len(x.claims))
	}
	x.mu.Unlock()
	if ids != x.requests() {
		x.t.Errorf("%s: %d sandboxes for %d requests", x.name, ids, x.requests())
	}
	if most := x.ask("most", x.name); most > slots {
		x.t.Errorf("%s: %d sandboxes were live at once, and %d fit", x.name, most, slots)
	}
	eventually.NoError(x.t, "nothing is left", func() error {
		var boxes agents.SandboxList
		var claims extensions.SandboxClaimList
		err := errors.Join(x.objects().List(x.t.Context(), &boxes, kube.InNamespace(x.name)), x.objects().List(x.t.Context(), &claims, kube.InNamespace(x.name)))
		if err == nil && len(boxes.Items)+len(claims.Items)+x.ask("waiting", x.name) > 0 {
			err = fmt.Errorf("%d sandboxes, %d claims and %d requests are left", len(boxes.Items), len(claims.Items), x.ask("waiting", x.name))
		}
		return err
	})
}
