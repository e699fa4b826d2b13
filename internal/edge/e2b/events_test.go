package e2b

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/events"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/webhooks"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// eventFixture records in a directory that outlives its processes.
type eventFixture struct {
	*fixture
	dir       string
	store     *events.Store
	recorder  atomic.Pointer[events.Recorder]
	deliverer atomic.Pointer[webhooks.Deliverer]
	stop      func()
}

func newEventFixture(t *testing.T, change ...func(*manager.Config)) *eventFixture {
	t.Helper()
	e := &eventFixture{dir: t.TempDir()}
	service := &webhooks.Service{Allowed: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, Changed: func() { e.deliverer.Load().Changed() }}
	e.fixture = newFixtureOf(t, func(c *manager.Config) {
		c.Webhooks, service.Quota = service, c.Quota
		for _, f := range change {
			f(c)
		}
	})
	service.Objects = e.cluster
	e.start()
	e.cluster.Watch(func(older, newer *agents.Sandbox) { e.recorder.Load().Observe(older, newer) })
	t.Cleanup(func() { e.stop() })
	return e
}

// start begins a process of the recorder and the deliverer.
func (e *eventFixture) start() {
	e.t.Helper()
	store, err := events.Open(e.dir, 0)
	if err != nil {
		e.t.Fatal(err)
	}
	service := e.manager.Webhooks
	deliverer, err := webhooks.NewDeliverer(webhooks.DelivererConfig{
		Events: store, Allowed: service.Allowed, Log: telemetry.Discard(), Backoff: func(int) time.Duration { return time.Millisecond },
		List: func(ctx context.Context) ([]webhooks.Webhook, error) { return service.List(ctx, "") },
	})
	if err != nil {
		e.t.Fatal(err)
	}
	recorder, err := events.NewRecorder(events.Config{
		Store: store, Objects: e.cluster, Log: telemetry.Discard(), Recorded: deliverer.Recorded,
		SizeOf: func(*agents.Sandbox) events.Size { return events.Size{CPUs: 2, MemoryMB: 512} },
		Gone:   func(context.Context, string) (bool, error) { return false, nil },
	})
	if err != nil {
		e.t.Fatal(err)
	}
	e.deliverer.Store(deliverer)
	e.recorder.Store(recorder)
	ctx, cancel := context.WithCancel(context.WithoutCancel(e.t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = recorder.Run(ctx) })
	running.Go(func() { _ = deliverer.Run(ctx) })
	e.store, e.manager.Events = store, store
	e.stop = func() {
		cancel()
		running.Wait()
		if err := store.Close(); err != nil {
			e.t.Error(err)
		}
	}
}

// types waits for the types of a sandbox's events, oldest first.
func (e *eventFixture) types(id string, want ...events.Type) []events.Event {
	e.t.Helper()
	var got []events.Event
	eventually.NoError(e.t, "the events", func() error {
		e.want(200, &got, "GET", "/events/sandboxes/"+id+"?orderAsc=true&limit=100", "")
		have := make([]events.Type, len(got))
		for i := range got {
			have[i] = got[i].Type
		}
		if !slices.Equal(have, want) {
			return fmt.Errorf("events are %v, want %v", have, want)
		}
		return nil
	})
	return got
}

// TestEventsOverTheWire has a sandbox live, with a restart of the recorder in between.
func TestEventsOverTheWire(t *testing.T) {
	e := newEventFixture(t)
	s := e.create(`{"templateID":"base","metadata":{"user":"a"}}`)
	path := "/sandboxes/" + s.SandboxID
	e.types(s.SandboxID, events.Created)
	e.want(204, nil, "POST", path+"/timeout", `{"timeout":900}`)
	e.types(s.SandboxID, events.Created, events.Updated)
	e.want(204, nil, "POST", path+"/pause", "")
	e.types(s.SandboxID, events.Created, events.Updated, events.Paused)
	e.stop()
	e.want(201, nil, "POST", path+"/connect", `{"timeout":60}`)
	e.start()
	e.types(s.SandboxID, events.Created, events.Updated, events.Paused, events.Resumed)
	e.want(201, nil, "POST", path+"/snapshots", `{"name":"kept"}`)
	e.stop()
	e.want(204, nil, "DELETE", path, "")
	e.start()
	all := e.types(s.SandboxID, events.Created, events.Updated, events.Paused, events.Resumed, events.Killed, events.Checkpointed)

	created, updated, paused, resumed := all[0], all[1], all[2], all[3]
	if created.Namespace != team || created.Data.Metadata["user"] != "a" || created.TemplateID == "" || created.ID == updated.ID || created.ExecutionID != paused.ExecutionID || resumed.ExecutionID == paused.ExecutionID {
		t.Errorf("events are %+v", all)
	}
	if updated.Data.SetTimeout == nil || paused.Data.Execution == nil || paused.Data.Execution.CPUs != 2 || all[4].Data.Execution == nil || !strings.HasPrefix(all[5].Data.SnapshotID, "kept:") {
		t.Errorf("the data of events are %+v, %+v, %+v, %+v", updated.Data, paused.Data, all[4].Data, all[5].Data)
	}
	e.wantPages(all)
}

// wantPages lists parts of what is recorded.
func (e *eventFixture) wantPages(all []events.Event) {
	t, created, paused := e.t, all[0], all[2]
	var got []events.Event
	for query, want := range map[string][]events.Event{
		"?limit=1":                         all[5:],
		"?limit=2&offset=4&orderAsc=true":  all[4:],
		"?types=sandbox.lifecycle.created": all[:1],
		"?types=sandbox.lifecycle.created&types=sandbox.lifecycle.paused&orderAsc=true": {created, paused},
	} {
		e.want(200, &got, "GET", "/events/sandboxes"+query, "")
		if !slices.EqualFunc(got, want, func(a, b events.Event) bool { return a.ID == b.ID }) {
			t.Errorf("%s: %+v, want %+v", query, got, want)
		}
	}
	e.want(200, &got, "GET", "/events/sandboxes", "", "X-API-Key", e.other)
	if len(got) != 0 {
		t.Errorf("another team sees %+v", got)
	}
	for query, field := range map[string]string{"?limit=0": "limit", "?limit=101": "limit", "?offset=-1": "offset", "?types=x": "types"} {
		if status, text, _ := e.do("GET", "/events/sandboxes"+query, ""); status != 400 || !strings.Contains(text, field+": ") {
			t.Errorf("%s: %d %s", query, status, text)
		}
	}
}

func TestTeamMetricsOverTheWire(t *testing.T) {
	e := newEventFixture(t)
	var metrics []api.TeamMetric
	e.want(200, &metrics, "GET", "/teams/"+team+"/metrics?start="+fmt.Sprint(time.Now().Add(-time.Minute).Unix()), "")
	if len(metrics) == 0 || metrics[0].ConcurrentSandboxes != 0 {
		t.Errorf("metrics are %+v", metrics)
	}
	var most api.MaxTeamMetric
	e.create(`{"templateID":"base"}`)
	eventually.NoError(t, "events", func() error {
		end := time.Now().Add(time.Second).Unix()
		e.want(200, &most, "GET", fmt.Sprintf("/teams/%s/metrics/max?metric=concurrent_sandboxes&start=%d&end=%d", team, end-60, end), "")
		if most.Value != 1 {
			return fmt.Errorf("the most is %+v", most)
		}
		return nil
	})
	e.want(403, nil, "GET", "/teams/"+otherTeam+"/metrics", "")
	e.want(400, nil, "GET", "/teams/"+team+"/metrics?start=5&end=4", "")
}

// receiver is a webhook's.
type receiver struct {
	*httptest.Server
	status atomic.Int32

	mu     sync.Mutex
	got    []events.Event
	faults []string
}

const signatureSecret = "s3cret"

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{}
	r.status.Store(http.StatusOK)
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		var e events.Event
		err := json.Unmarshal(body, &e)
		r.mu.Lock()
		defer r.mu.Unlock()
		if err != nil || req.Header.Get("e2b-signature") != webhooks.Signature(signatureSecret, body) || req.Header.Get("e2b-signature-version") != "v1" || req.Header.Get("e2b-delivery-id") == "" {
			r.faults = append(r.faults, fmt.Sprint(err, req.Header))
		}
		status := int(r.status.Load())
		if status == http.StatusOK {
			r.got = append(r.got, e)
		} else {
			w.Header().Set("Location", "/elsewhere")
		}
		w.WriteHeader(status)
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) wait(t *testing.T, want ...events.Type) {
	t.Helper()
	eventually.NoError(t, "events", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		var have []events.Type
		for _, e := range r.got {
			have = append(have, e.Type)
		}
		if !slices.Equal(have, want) || len(r.faults) > 0 {
			return fmt.Errorf("received %v, want %v; faults %v", have, want, r.faults)
		}
		return nil
	})
}

// TestWebhooksOverTheWire delivers to a receiver that fails at first, over a restart.
func TestWebhooksOverTheWire(t *testing.T) {
	e, r := newEventFixture(t), newReceiver(t)
	before := e.create(`{"templateID":"base"}`)
	e.types(before.SandboxID, events.Created)
	var hook api.Webhook
	e.want(201, &hook, "POST", "/events/webhooks", fmt.Sprintf(`{"name":"n","url":%q,"signatureSecret":%q,"events":["sandbox.lifecycle.created","sandbox.lifecycle.killed"]}`, r.URL, signatureSecret))
	s := e.create(`{"templateID":"base"}`)
	r.wait(t, events.Created)
	r.status.Store(http.StatusFound) // a redirect is a failure
	e.want(204, nil, "DELETE", "/sandboxes/"+s.SandboxID, "")
	eventually.NoError(t, "events", func() error {
		e.want(200, &hook, "GET", "/events/webhooks/"+hook.ID, "")
		if hook.LastError == nil || !strings.Contains(*hook.LastError, "302") || hook.FailingSince == nil {
			return fmt.Errorf("the webhook is %+v", hook)
		}
		return nil
	})
	e.stop()
	r.status.Store(http.StatusOK)
	e.start()
	e.want(204, nil, "DELETE", "/sandboxes/"+before.SandboxID, "")
	e.types(before.SandboxID, events.Created, events.Killed)
	eventually.NoError(t, "events", func() error { // the first kill may have used up its attempts before the restart
		r.mu.Lock()
		defer r.mu.Unlock()
		if n := len(r.got); n < 2 || r.got[n-1].SandboxID != before.SandboxID || r.got[n-1].Type != events.Killed || len(r.faults) > 0 {
			return fmt.Errorf("received %+v; faults %v", r.got, r.faults)
		}
		return nil
	})
	e.want(200, &hook, "PATCH", "/events/webhooks/"+hook.ID, `{"enabled":false}`)
	if hook.Enabled || hook.Name != "n" {
		t.Errorf("the webhook is %+v", hook)
	}
	if _, text, _ := e.do("GET", "/events/webhooks", ""); strings.Contains(text, signatureSecret) || !strings.Contains(text, hook.ID) {
		t.Errorf("the list is %s", text)
	}
	e.want(404, nil, "GET", "/events/webhooks/"+hook.ID, "", "X-API-Key", e.other)
	e.want(404, nil, "DELETE", "/events/webhooks/"+hook.ID, "", "X-API-Key", e.other)
	e.want(200, nil, "DELETE", "/events/webhooks/"+hook.ID, "")
	e.want(404, nil, "GET", "/events/webhooks/"+hook.ID, "")
}

func TestWebhookRefusals(t *testing.T) {
	e := newEventFixture(t)
	for field, body := range map[string]string{
		"name":                  `{"name":"","url":"http://x.example","signatureSecret":"s","events":["sandbox.lifecycle.created"]}`,
		"signatureSecret":       `{"name":"n","url":"http://x.example","signatureSecret":"","events":["sandbox.lifecycle.created"]}`,
		"events":                `{"name":"n","url":"http://x.example","signatureSecret":"s","events":["x"]}`,
		"url":                   `{"name":"n","url":"ftp://x.example","signatureSecret":"s","events":["sandbox.lifecycle.created"]}`,
		"url: 10.0.0.1":         `{"name":"n","url":"http://10.0.0.1/","signatureSecret":"s","events":["sandbox.lifecycle.created"]}`,
		"url: ::ffff:127.0.0.2": `{"name":"n","url":"http://[::ffff:127.0.0.2]/","signatureSecret":"s","events":["sandbox.lifecycle.created"]}`,
	} {
		if status, text, _ := e.do("POST", "/events/webhooks", body); status != 400 || !strings.Contains(text, field) {
			t.Errorf("%s: %d %s", field, status, text)
		}
	}
	var all []api.Webhook
	if e.want(200, &all, "GET", "/events/webhooks", ""); len(all) != 0 {
		t.Errorf("refused webhooks are kept: %+v", all)
	}
	plain := newFixture(t)
	for _, path := range []string{"/events/webhooks", "/events/sandboxes", "/teams/" + team + "/metrics"} {
		plain.want(501, nil, "GET", path, "")
	}
}

func TestRenamedKeysAndAccessTokens(t *testing.T) {
	f := newFixture(t)
	var token api.CreatedAccessToken
	f.want(201, &token, "POST", "/access-tokens", `{"name":"cli"}`)
	f.want(200, nil, "GET", "/teams", "", "X-API-Key", "", "Authorization", "Bearer "+token.Token)
	f.want(204, nil, "PATCH", "/api-keys/"+token.ID, `{"name":"renamed"}`)
	f.want(400, nil, "PATCH", "/api-keys/"+token.ID, `{"name":""}`)
	f.want(404, nil, "PATCH", "/api-keys/"+token.ID, `{"name":"x"}`, "X-API-Key", f.other)
	if _, text, _ := f.do("GET", "/api-keys", ""); !strings.Contains(text, `"renamed"`) {
		t.Errorf("the keys are %s", text)
	}
	f.want(204, nil, "DELETE", "/access-tokens/"+token.ID, "")
	f.want(401, nil, "GET", "/teams", "", "X-API-Key", "", "Authorization", "Bearer "+token.Token)
	f.want(403, nil, "GET", "/secrets", "")
	f.want(403, nil, "GET", "/nodes/x", "")
}
