package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	sdk "github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubefakes"
)

const (
	templateName = "base"
	poolName     = "pool"
	poolSize     = 12
	// plainSandboxes are of no template, and have a Service and a volume.
	plainSandboxes = 5
	// operations are claims and E2B creates, in turns.
	operations = 200
	// visits are requests to each sandbox that are answered.
	visits = 3
)

// load is what clients know.
type load struct {
	mu        sync.Mutex
	revisions map[string]int  // the order of the template's revisions; +checklocks:mu
	current   int             // the newest that was written for sure; +checklocks:mu
	created   map[string]bool // IDs that creates returned; +checklocks:mu
	kept      []string        // IDs of sandboxes that stay until the end; +checklocks:mu
	claims    []string        // names of claims that stay; +checklocks:mu
	failures  map[string]int  // requests that failed as they may, by kind; +checklocks:mu
	answered  int             // +checklocks:mu
}

func newLoad() load {
	return load{revisions: map[string]int{}, created: map[string]bool{}, failures: map[string]int{}}
}

func (l *load) summary() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprintf("%d revisions, %d sandboxes of the E2B API, %d requests answered; failed: %v", len(l.revisions), len(l.created), l.answered, l.failures)
}

// failed counts a failure that a fault explains; any other fails the test. An API server that starts refuses requests with 403.
func (s *suite) failed(what string, err error) {
	kind := "no response"
	if refusal, ok := errors.AsType[*sdk.Error](err); ok {
		kind = fmt.Sprint(refusal.Status)
		explained := slices.Contains([]int{http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout}, refusal.Status) ||
			refusal.Status == http.StatusForbidden && s.cluster.Restarting()
		if !explained {
			s.Errorf("%s: %d %v", what, refusal.Status, err)
		}
	}
	s.load.mu.Lock()
	defer s.load.mu.Unlock()
	s.load.failures[what+": "+kind]++
}

func template(revision int) *extensions.SandboxTemplate {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: templateName}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "barchan.test/pod:1", Env: []corev1.EnvVar{{Name: "REVISION", Value: fmt.Sprint(revision)}}}}
	return t
}

// announce records a revision before it is written, since a claim may get it before the response.
func (s *suite) announce(revision int) *extensions.SandboxTemplate {
	t := template(revision)
	hash, _, err := pool.Revision(t)
	if err != nil {
		s.Error(err)
	}
	s.load.mu.Lock()
	defer s.load.mu.Unlock()
	s.load.revisions[hash] = revision
	return t
}

func plainName(i int) string { return fmt.Sprintf("plain-%d", i) }

func plainSandbox(i int) *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: plainName(i)}}
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "barchan.test/pod:1"}}
	s.Spec.Service = new(true)
	data := agents.PersistentVolumeClaimTemplate{}
	data.Name = "data"
	data.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	data.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}
	s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{data}
	return s
}

// fill creates what there is before the faults: the pool, and sandboxes with volumes.
func (s *suite) fill() {
	s.Helper()
	warm := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: poolName}}
	warm.Spec.Replicas, warm.Spec.SandboxTemplateRef.Name = new(int32(poolSize)), templateName
	all := []client.Object{
		&storagev1.StorageClass{
			ObjectMeta:  metav1.ObjectMeta{Name: "host-path", Annotations: map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}},
			Provisioner: "kubernetes.io/host-path",
		},
		s.announce(0), warm,
	}
	for i := range plainSandboxes {
		all = append(all, plainSandbox(i))
	}
	_, err := s.cluster.Client.StorageV1().StorageClasses().Create(s.Context(), all[0].(*storagev1.StorageClass), metav1.CreateOptions{}) //nolint:forcetypeassert // see above
	must(s, err)
	for _, o := range all[1:] {
		must(s, s.client.Create(s.Context(), o))
	}
	s.checkPool()
	s.checkPlain()
}

// rollOut changes the template every few seconds until ctx ends.
func (s *suite) rollOut(ctx context.Context) {
	for revision := 1; lifecycle.Sleep(ctx, s.dice.pause(6*time.Second)); revision++ {
		next := s.announce(revision)
		err := s.call("update the template", func(ctx context.Context) error { //nolint:contextcheck // calls go on after the faults
			now := &extensions.SandboxTemplate{}
			if err := s.client.Get(ctx, client.ObjectKeyFromObject(next), now); err != nil {
				return err
			}
			now.Spec = next.Spec
			return s.client.Update(ctx, now)
		})
		if err != nil {
			s.Error(err)
			return
		}
		s.load.mu.Lock()
		s.load.current = revision
		s.load.mu.Unlock()
	}
}

func (s *suite) currentRevision() int {
	s.load.mu.Lock()
	defer s.load.mu.Unlock()
	return s.load.current
}

// checkRevision verifies that a sandbox is not of an older revision than the template was when its owner asked for it.
func (s *suite) checkRevision(who string, b *box, current int) {
	s.load.mu.Lock()
	defer s.load.mu.Unlock()
	if got, known := s.load.revisions[b.revision]; !known || got < current {
		s.Errorf("%s got sandbox %s of revision %d (%s), when %d was the template's", who, b.name, got, b.revision, current)
	}
}

// claimAll begins all operations at a steady rate while faults happen, and returns when they have ended.
func (s *suite) claimAll(ctx context.Context) {
	every := time.NewTicker(*duration / operations)
	defer every.Stop()
	var all sync.WaitGroup
	defer all.Wait()
	for i := range operations {
		all.Go(func() { //nolint:contextcheck // calls go on after the faults
			var err error
			if i%2 == 0 {
				err = s.claim(fmt.Sprintf("claim-%d", i), i%10 == 0)
			} else {
				err = s.create(i%10 == 1)
			}
			if err != nil {
				s.Errorf("operation %d: %v", i, err)
			}
		})
		select {
		case <-every.C:
		case <-ctx.Done(): // the ticker was late
		}
	}
}

// claim creates a SandboxClaim, uses its sandbox and deletes it, unless it is kept.
func (s *suite) claim(name string, keep bool) error {
	current := s.currentRevision()
	c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	c.Spec.WarmPoolRef.Name = poolName
	if err := s.call("create "+name, func(ctx context.Context) error {
		err := s.client.Create(ctx, c.DeepCopy())
		if apierrors.IsAlreadyExists(err) { // by a request without a response
			return nil
		}
		return err
	}); err != nil {
		return err
	}
	var b *box
	if err := within(func() (err error) { b, err = s.history.served(name); return err }); err != nil {
		return err
	}
	s.checkRevision("claim "+name, b, current)
	if err := s.visit(string(b.id), visits); err != nil {
		return err
	}
	if keep {
		s.load.mu.Lock()
		defer s.load.mu.Unlock()
		s.load.claims = append(s.load.claims, name)
		return nil
	}
	time.Sleep(s.dice.pause(time.Second))
	return s.remove(c)
}

// create creates a sandbox by the E2B API, uses it and kills it, unless it is kept. Each request is sent to any replica, and again where that
// does not answer, as a load balancer and its client do.
func (s *suite) create(keep bool) error {
	var made *sdk.Sandbox
	var current int
	if err := s.call("create", func(ctx context.Context) (err error) {
		current = s.currentRevision()
		if made, err = s.apis[s.dice.below(len(s.apis))].Create(ctx, sdk.CreateOptions{TemplateID: templateName, Timeout: time.Hour}); err != nil {
			s.failed("create", err)
		}
		return err
	}); err != nil {
		return err
	}
	s.load.mu.Lock()
	if s.load.created[made.SandboxID] {
		s.Errorf("two creates got sandbox %s", made.SandboxID)
	}
	s.load.created[made.SandboxID] = true
	if keep {
		s.load.kept = append(s.load.kept, made.SandboxID)
	}
	s.load.mu.Unlock()
	var b *box
	if err := within(func() (err error) { b, err = s.history.withID(sandbox.ID(made.SandboxID)); return err }); err != nil {
		return err
	}
	s.checkRevision("a create", b, current)
	if err := s.visit(made.SandboxID, visits); err != nil || keep {
		return err
	}
	time.Sleep(s.dice.pause(time.Second))
	return s.kill(made.SandboxID)
}

func (s *suite) kill(id string) error {
	tried := false
	return s.call("kill "+id, func(ctx context.Context) error {
		err := s.apis[s.dice.below(len(s.apis))].Kill(ctx, id)
		refusal, refused := errors.AsType[*sdk.Error](err)
		if tried && refused && refusal.Status == http.StatusNotFound { // the response to the first was lost
			return nil
		}
		tried = true
		if err != nil {
			s.failed("kill", err)
		}
		return err
	})
}

// visit sends requests to a sandbox by any replica until some were answered.
func (s *suite) visit(id string, times int) error {
	for range times {
		if err := s.call("visit "+id, func(ctx context.Context) error {
			err := s.visitBy(ctx, s.dice.below(len(s.urls)), id)
			if err != nil {
				s.failed("visit", err)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// visitBy sends a request to a sandbox by a replica. The agents verify that they are meant.
func (s *suite) visitBy(ctx context.Context, replica int, id string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s/sandbox/%s/%d/whoami", s.urls[replica], id, envd.Port), http.NoBody)
	if err != nil {
		return err
	}
	req.Header.Set(kubefakes.HeaderFor, id)
	res, err := s.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return &sdk.Error{Status: res.StatusCode, Message: string(text)}
	}
	s.load.mu.Lock()
	defer s.load.mu.Unlock()
	s.load.answered++
	if string(text) != id {
		s.Errorf("a request for sandbox %s was answered by %s", id, text)
	}
	return nil
}

// checkRecovered verifies that everything is as if there had been no fault.
func (s *suite) checkRecovered() {
	s.Helper()
	s.checkPool()
	s.checkPlain()
	s.load.mu.Lock()
	claims, kept, failures := s.load.claims, s.load.kept, maps.Clone(s.load.failures)
	s.load.mu.Unlock()
	for _, name := range claims {
		eventually.NoError(s, "claim "+name+" is served", func() error {
			b, err := s.history.served(name)
			if err != nil {
				return err
			}
			kept = append(kept, string(b.id))
			if n := s.history.count(func(o *box) bool { return o.owner == b.owner }); n != 1 {
				return fmt.Errorf("it owns %d sandboxes", n)
			}
			return nil
		})
	}
	for _, id := range kept {
		for replica := range s.urls {
			eventually.NoError(s, "sandbox "+id+" answers", func() error { return s.visitBy(s.Context(), replica, id) })
		}
	}
	listed, err := s.apis[0].List(s.Context(), sdk.ListOptions{})
	must(s, err)
	unknown, lost := 0, 0
	for _, l := range listed {
		if !slices.Contains(kept, l.SandboxID) {
			unknown++
		}
	}
	for kind, n := range failures {
		if strings.HasPrefix(kind, "create: ") {
			lost += n
		}
	}
	if unknown > lost+plainSandboxes {
		s.Errorf("%d sandboxes have no client, of %d creates without a response", unknown, lost)
	}
	s.checkPolicies()
}

// checkPool waits until the pool has its size, in members of the current revision.
func (s *suite) checkPool() {
	s.Helper()
	warm := &extensions.SandboxWarmPool{}
	eventually.NoError(s, "the pool is full", func() error {
		if err := s.client.Get(s.Context(), client.ObjectKey{Namespace: namespace, Name: poolName}, warm); err != nil {
			return err
		}
		current := s.currentRevision()
		all := s.history.count(func(b *box) bool { return b.pool == warm.UID })
		right := s.history.count(func(b *box) bool {
			s.load.mu.Lock()
			defer s.load.mu.Unlock()
			return b.pool == warm.UID && b.ready && s.load.revisions[b.revision] == current
		})
		if all != poolSize || right != poolSize || warm.Status.ReadyReplicas != poolSize {
			return fmt.Errorf("%d members, %d of them ready and of revision %d; status %+v", all, right, current, warm.Status)
		}
		return nil
	})
}

// checkPlain waits until the sandboxes with volumes have all that is theirs.
func (s *suite) checkPlain() {
	s.Helper()
	for i := range plainSandboxes {
		name := plainName(i)
		eventually.NoError(s, name+" is whole", func() error {
			box, service, volume := &agents.Sandbox{}, &corev1.Service{}, &corev1.PersistentVolumeClaim{}
			err := errors.Join(
				s.client.Get(s.Context(), client.ObjectKey{Namespace: namespace, Name: name}, box),
				s.client.Get(s.Context(), client.ObjectKey{Namespace: namespace, Name: name}, service),
				s.client.Get(s.Context(), client.ObjectKey{Namespace: namespace, Name: "data-" + name}, volume))
			switch {
			case err != nil:
				return err
			case !metav1.IsControlledBy(service, box) || !metav1.IsControlledBy(volume, box):
				return fmt.Errorf("its Service is of %v, its volume of %v", service.OwnerReferences, volume.OwnerReferences)
			case !sandbox.Ready(box) || volume.DeletionTimestamp != nil:
				return fmt.Errorf("status %+v, volume %+v", box.Status, volume.ObjectMeta)
			}
			return nil
		})
	}
}

// checkPolicies verifies that each Pod is selected by its NetworkPolicies, and claimed ones by the budget.
func (s *suite) checkPolicies() {
	s.Helper()
	eventually.NoError(s, "policies of all Pods", func() error {
		policies, err := s.cluster.Client.NetworkingV1().NetworkPolicies(namespace).List(s.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		have := map[string]bool{}
		for _, p := range policies.Items {
			have[p.Labels[sandbox.LabelPolicy]] = true
		}
		var pods corev1.PodList
		if err := s.list(&pods, sandbox.LabelID); err != nil {
			return err
		}
		for i := range pods.Items {
			if label := pods.Items[i].Labels[sandbox.LabelPolicy]; !have[label] || !have["barchan-sandboxes"] {
				return fmt.Errorf("Pod %s has policy %q; there are %v", pods.Items[i].Name, label, have)
			}
		}
		_, err = s.cluster.Client.PolicyV1().PodDisruptionBudgets(namespace).Get(s.Context(), "barchan-claimed", metav1.GetOptions{})
		return err
	})
}

// clear deletes everything, and verifies that nothing is left but the policies of the namespace.
func (s *suite) clear() {
	s.Helper()
	must(s, s.client.DeleteAllOf(s.Context(), &extensions.SandboxClaim{}, client.InNamespace(namespace)))
	must(s, s.client.DeleteAllOf(s.Context(), &extensions.SandboxWarmPool{}, client.InNamespace(namespace)))
	for i := range plainSandboxes {
		must(s, s.client.Delete(s.Context(), plainSandbox(i)))
	}
	eventually.NoError(s, "all sandboxes are killed", func() error {
		listed, err := s.apis[1].List(s.Context(), sdk.ListOptions{})
		for _, l := range listed {
			_ = s.apis[1].Kill(s.Context(), l.SandboxID) // listed again
		}
		if err == nil && len(listed) > 0 {
			err = fmt.Errorf("%d are listed", len(listed))
		}
		return err
	})
	must(s, s.client.Delete(s.Context(), template(0)))
	for kind, list := range map[string]func() (names []string, err error){
		"sandboxes": func() ([]string, error) { return namesOf(s, &agents.SandboxList{}) },
		"Pods":      func() ([]string, error) { return namesOf(s, &corev1.PodList{}) },
		"Services":  func() ([]string, error) { return namesOf(s, &corev1.ServiceList{}) },
		"volumes":   func() ([]string, error) { return namesOf(s, &corev1.PersistentVolumeClaimList{}) },
		"NetworkPolicies": func() (names []string, err error) {
			list, err := s.cluster.Client.NetworkingV1().NetworkPolicies(namespace).List(s.Context(), metav1.ListOptions{})
			for i := range list.Items {
				if p := &list.Items[i]; len(p.OwnerReferences) > 0 || !strings.HasPrefix(p.Name, "barchan-sandboxes") {
					names = append(names, p.Name)
				}
			}
			return names, err
		},
	} {
		eventually.NoError(s, "no "+kind+" are left", func() error {
			names, err := list()
			names = slices.DeleteFunc(names, func(name string) bool { return name == "kubernetes" })
			if err == nil && len(names) > 0 {
				err = fmt.Errorf("left: %v", names)
			}
			return err
		})
	}
}

// namesOf returns the names of all objects of a kind in the namespace.
func namesOf(s *suite, list client.ObjectList) (names []string, err error) {
	err = s.list(list)
	_ = meta.EachListItem(list, func(o runtime.Object) error { // returns what the function does
		if o, ok := o.(client.Object); ok {
			names = append(names, o.GetName())
		}
		return nil
	})
	return names, err
}
