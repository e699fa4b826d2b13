package quota_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

func meta(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: team, Name: name} }

func checkpoint(name, size string) *barchan.Checkpoint {
	c := &barchan.Checkpoint{ObjectMeta: meta(name)}
	if size != "" {
		c.Status.Size = new(resource.MustParse(size))
	}
	return c
}

// store is an API server that refuses by fail. What it has is shown to the quotas by show.
type store struct {
	fail error
	mu   sync.Mutex
	has  []client.Object
}

func (s *store) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail == nil {
		s.has = append(s.has, o)
	}
	return s.fail
}

// observe shows an object to the quotas, or with gone its deletion.
func observe(q *quota.Quotas, o client.Object, gone bool) {
	switch o := o.(type) {
	case *extensions.SandboxTemplate:
		shown(q, o, gone)
	case *barchan.Checkpoint:
		shown(q, o, gone)
	case *barchan.TemplateBuild:
		shown(q, o, gone)
	case *corev1.Secret:
		shown(q, o, gone)
	case *barchan.APIKey:
		shown(q, o, gone)
	}
}

func shown[T interface {
	client.Object
	comparable
}](q *quota.Quotas, o T, gone bool) {
	var none T
	if gone {
		quota.ObserveObjects[T](q)(o, none)
	} else {
		quota.ObserveObjects[T](q)(none, o)
	}
}

// TestObjects has each kind meet its limit, before and after the cache shows what was created, and make room by a deletion.
func TestObjects(t *testing.T) { //nolint:gocyclo // one story
	for kind, make := range map[quota.Kind]func(name string) client.Object{
		quota.Templates: func(name string) client.Object { return &extensions.SandboxTemplate{ObjectMeta: meta(name)} },
		quota.Snapshots: func(name string) client.Object { return checkpoint(name, "1Mi") },
		quota.Builds:    func(name string) client.Object { return &barchan.TemplateBuild{ObjectMeta: meta(name)} },
		quota.Keys:      func(name string) client.Object { return &barchan.APIKey{ObjectMeta: meta(name)} },
		quota.Webhooks: func(name string) client.Object {
			s := &corev1.Secret{ObjectMeta: meta(name), Type: barchan.WebhookSecretType}
			s.Labels = map[string]string{barchan.LabelWebhook: ""}
			return s
		},
	} {
		t.Run(kind.String(), func(t *testing.T) {
			var defaults quota.Limits
			defaults.Objects[kind] = quota.AtMost(2)
			q, reader := newQuotas(t, defaults, nil)
			api := &store{}
			create := func(name string) error { return q.Create(t.Context(), api, make(name)) }
			refused := func(name, most string) {
				t.Helper()
				err := create(name)
				if text := errs.Text(err); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(text, "at most "+most+" ") || !strings.Contains(text, "barchan.dev/quota-"+kind.String()) {
					t.Errorf("create %s: %v", name, err)
				}
			}
			api.fail = errs.ErrUnavailable
			for range 5 { // what was not created does not count
				if err := create("lost"); !errors.Is(err, errs.ErrUnavailable) {
					t.Errorf("create while the server is away: %v", err)
				}
			}
			api.fail = nil
			for _, name := range []string{"a", "b"} {
				if err := create(name); err != nil {
					t.Fatal(err)
				}
			}
			refused("c", "2") // the cache shows none yet
			if err := q.CheckRoom(t.Context(), team, kind, 1); !errors.Is(err, errs.ErrExhausted) {
				t.Errorf("CheckRoom: %v", err)
			}
			for _, o := range api.has {
				observe(q, o, false)
			}
			refused("c", "2")
			if n := q.Objects(team, kind); n != 2 {
				t.Errorf("%d count", n)
			}
			if err := create("a"); err != nil { // which the server refuses, not the quota
				t.Errorf("one that exists: %v", err)
			}
			observe(q, make("a"), true)
			if err := create("c"); err != nil {
				t.Errorf("after a deletion: %v", err)
			}
			refused("d", "2")

			reader.annotations = map[string]string{kind.Annotation(): "3"}
			if err := create("d"); err != nil {
				t.Errorf("with more by the annotation: %v", err)
			}
			refused("e", "3")
			reader.annotations[kind.Annotation()] = "many"
			refused("e", "2") // the default

			again, _ := newQuotas(t, defaults, nil) // of the next process, which has seen the first list
			for _, name := range []string{"b", "c"} {
				observe(again, make(name), false)
			}
			if _, err := again.Add(t.Context(), make("d")); !errors.Is(err, errs.ErrExhausted) {
				t.Errorf("after a restart: %v", err)
			}
			free, _ := newQuotas(t, quota.Limits{}, nil)
			if _, err := free.Add(t.Context(), make("a")); err != nil {
				t.Errorf("without a limit: %v", err)
			}
		})
	}
}

// TestObjectsAtOnce has many creates at once take no more than the room.
func TestObjectsAtOnce(t *testing.T) {
	var defaults quota.Limits
	defaults.Objects[quota.Snapshots] = quota.AtMost(5)
	q, _ := newQuotas(t, defaults, nil)
	api := &store{}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if err := q.Create(t.Context(), api, checkpoint(fmt.Sprint(i), "")); err != nil && !errors.Is(err, errs.ErrExhausted) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(api.has) != 5 {
		t.Errorf("%d were created, want 5", len(api.has))
	}
}

// TestWhatDoesNotCount creates what has no number, and ends what had one.
func TestWhatDoesNotCount(t *testing.T) {
	var defaults quota.Limits
	for _, kind := range quota.Kinds() {
		defaults.Objects[kind] = quota.AtMost(0)
	}
	q, _ := newQuotas(t, defaults, nil)
	plain := &corev1.Secret{ObjectMeta: meta("plain"), Type: barchan.WebhookSecretType} // a webhook has a label too
	for _, o := range []client.Object{plain, &corev1.ConfigMap{ObjectMeta: meta("text")}} {
		if _, err := q.Add(t.Context(), o); err != nil {
			t.Errorf("%T: %v", o, err)
		}
	}
	b := &barchan.TemplateBuild{ObjectMeta: meta("b")}
	observe(q, b, false)
	if n := q.Objects(team, quota.Builds); n != 1 {
		t.Errorf("%d builds count", n)
	}
	b.Status.Phase = barchan.BuildFailed
	observe(q, b, false)
	if n := q.Objects(team, quota.Builds); n != 0 {
		t.Errorf("%d builds count after the end of the only one", n)
	}
}

// TestStored counts snapshots and the memory of paused sandboxes, as long as they are there.
func TestStored(t *testing.T) {
	q, reader := newQuotas(t, quota.Limits{Stored: quota.AtMost(3 << 20)}, nil)
	stored := func(s *agents.Sandbox) {
		s.Status.Barchan = &agents.BarchanStatus{MemorySize: resource.NewQuantity(2<<20, resource.BinarySI)}
	}
	uses := func(what string, want int64) {
		t.Helper()
		if n := q.Stored(team); n != want {
			t.Errorf("%s: %d bytes are used, want %d", what, n, want)
		}
		err := q.CheckStored(t.Context(), team)
		if (want < 3<<20) != (err == nil) {
			t.Errorf("%s: CheckStored = %v", what, err)
		}
	}
	snapshot, s := checkpoint("c", "1Mi"), box("s", paused, stored)
	q.Observe(nil, box("s", paused)) // its memory is still in RAM
	observe(q, checkpoint("c", ""), false)
	uses("before anything is on disk", 0)
	q.Observe(nil, s)
	uses("the memory of a paused sandbox", 2<<20)
	observe(q, snapshot, false)
	uses("and a snapshot", 3<<20)
	if err := q.CheckStored(t.Context(), team); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(errs.Text(err), "at most 3Mi") ||
		!strings.Contains(errs.Text(err), "they have 3Mi") || !strings.Contains(errs.Text(err), quota.AnnotationStored) {
		t.Errorf("a full namespace: %v", err)
	}
	if err := q.CheckStored(t.Context(), "another"); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	reader.annotations = map[string]string{quota.AnnotationStored: "4Mi"}
	if err := q.CheckStored(t.Context(), team); err != nil {
		t.Errorf("with more by the annotation: %v", err)
	}
	reader.annotations = nil
	q.Observe(s, box("s"))
	uses("after a resume", 1<<20)
	q.Observe(box("s"), s)
	q.Observe(s, nil)
	uses("after the sandbox was deleted", 1<<20)
	observe(q, snapshot, true)
	uses("after the snapshot was deleted", 0)
}

// TestAutoPause refuses only what would store memory without being asked.
func TestAutoPause(t *testing.T) {
	q, _ := newQuotas(t, quota.Limits{Stored: quota.AtMost(1 << 20)}, nil)
	observe(q, checkpoint("c", "1Mi"), false)
	for name, c := range map[string]struct {
		policies *agents.BarchanSpec
		refused  bool
	}{
		"none":             {nil, false},
		"ends":             {&agents.BarchanSpec{OnTimeout: agents.TimeoutShutdown}, false},
		"timeout":          {&agents.BarchanSpec{OnTimeout: agents.TimeoutPause}, true},
		"timeout to files": {&agents.BarchanSpec{OnTimeout: agents.TimeoutPause, Suspend: agents.SuspendFiles}, false},
		"idle":             {&agents.BarchanSpec{Idle: &agents.IdlePolicy{}}, true},
		"idle ends":        {&agents.BarchanSpec{Idle: &agents.IdlePolicy{Action: agents.TimeoutShutdown}}, false},
	} {
		err := q.CheckAutoPause(t.Context(), team, c.policies)
		if errors.Is(err, errs.ErrExhausted) != c.refused || (err != nil) != c.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}
