package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	wire "github.com/barchan-dev/barchan/internal/edge/e2b/sandboxes"
)

func TestSnapshotsOverTheWire(t *testing.T) {
	f := newFixture(t)
	s := f.create(`{"templateID":"base","secure":true}`)
	at := "/sandboxes/" + s.SandboxID
	var one, two api.Snapshot
	f.want(201, &one, "POST", at+"-client/snapshots", "")
	f.want(201, &two, "POST", at+"/snapshots", `{"name":"mine:v1","memory":false,"ttl":60,"unknown":1}`)
	if !strings.HasPrefix(one.SnapshotID, "base:") || !one.Memory || one.ExpiresAt != nil || one.SandboxID != s.SandboxID || one.TemplateID != s.TemplateID {
		t.Errorf("snapshot is %+v", one)
	}
	if two.SnapshotID != "mine:v1" || fmt.Sprint(two.Names) != "[team-a/mine:v1]" || two.Memory || two.MemoryBytes != 0 || two.ExpiresAt == nil {
		t.Errorf("snapshot is %+v", two)
	}
	for _, id := range []string{one.SnapshotID, "mine"} {
		if made := f.create(`{"templateID":"` + id + `","timeout":60}`); made.TemplateID != s.TemplateID || made.SandboxID == s.SandboxID {
			t.Errorf("from %s: %+v", id, made)
		}
	}
}

// On a cluster no node keeps snapshots.
func TestSnapshotsOfPods(t *testing.T) {
	f := newFixtureOf(t, func(c *manager.Config) { c.Pods = true })
	at := "/sandboxes/" + f.create(`{"templateID":"base"}`).SandboxID
	for _, path := range []string{"/snapshots", "/fork", "/fork?stream=true"} {
		if status, text, _ := f.do("POST", at+path, ""); status != 501 || !strings.Contains(text, "not available on a Kubernetes cluster") {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
}

func TestSnapshotsAreDeletedAsTemplates(t *testing.T) {
	f := newFixture(t)
	at := "/sandboxes/" + f.create(`{"templateID":"base"}`).SandboxID
	var one, two api.Snapshot
	f.want(201, &one, "POST", at+"/snapshots", "")
	f.want(201, &two, "POST", at+"/snapshots", `{"name":"mine:v1"}`)
	gone := "/templates/" + url.PathEscape(two.Names[0])
	for _, path := range []string{gone, "/templates/" + url.PathEscape(one.SnapshotID)} {
		if status, text, _ := f.do("DELETE", path, "", "X-API-Key", f.other); status != 404 {
			t.Errorf("DELETE %s by another team = %d %s", path, status, text)
		}
		f.want(204, nil, "DELETE", path, "")
		f.want(404, nil, "DELETE", path, "")
	}
}

func TestListsOfSnapshotsOverTheWire(t *testing.T) {
	f := newFixture(t)
	s := f.create(`{"templateID":"base"}`)
	for range 2 {
		f.want(201, nil, "POST", "/sandboxes/"+s.SandboxID+"/snapshots", "")
	}
	var page []api.Snapshot
	h := f.want(200, &page, "GET", "/snapshots?limit=1&sandboxID="+s.SandboxID, "")
	if len(page) != 1 || h.Get("X-Next-Token") == "" {
		t.Fatalf("page is %+v with %v", page, h)
	}
	h = f.want(200, &page, "GET", "/snapshots?limit=1&nextToken="+url.QueryEscape(h.Get("X-Next-Token")), "")
	if _, has := h["X-Next-Token"]; len(page) != 1 || has {
		t.Errorf("last page is %+v with %v", page, h)
	}
	if _, text, _ := f.do("GET", "/snapshots", "", "X-API-Key", f.other); strings.TrimSpace(text) != "[]" {
		t.Errorf("another team's list is %s", text)
	}
}

func TestForksOverTheWire(t *testing.T) {
	f := newFixture(t)
	s := f.create(`{"templateID":"base","metadata":{"a":"1"}}`)
	at := "/sandboxes/" + s.SandboxID
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: team, Annotations: map[string]string{quota.AnnotationSandboxes: "3"}}}
	if err := f.cluster.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	var forks []api.ForkResult
	f.want(201, &forks, "POST", at+"/fork", `{"count":4,"timeout":120,"metadata":{"b":"2"}}`)
	if len(forks) != 4 {
		t.Fatalf("forks are %+v", forks)
	}
	for i, one := range forks[:2] {
		if one.Error != nil || one.Sandbox == nil || one.Sandbox.TemplateID != s.TemplateID || one.Sandbox.ClientID == "" {
			t.Fatalf("fork %d is %+v", i, one)
		}
	}
	for i, one := range forks[2:] {
		if one.Sandbox != nil || one.Error == nil || one.Error.Code != 429 || !strings.Contains(one.Error.Message, "quota of the namespace") {
			t.Errorf("fork %d is %+v, want a refusal by the quota", i+2, one)
		}
	}
	var d api.SandboxDetail
	f.want(200, &d, "GET", "/sandboxes/"+forks[0].Sandbox.SandboxID, "")
	if d.Metadata == nil || fmt.Sprint(*d.Metadata) != "map[a:1 b:2]" {
		t.Errorf("metadata are %v", d.Metadata)
	}
	f.want(204, nil, "POST", at+"/pause", "")
	f.want(409, nil, "POST", at+"/fork", "")
}

// TestForksAreStreamed reads the lines of two forks while a third is still being made, and wants a refusal
// to be answered as without lines.
func TestForksAreStreamed(t *testing.T) {
	held := make(chan struct{})
	f := newFixtureOf(t, func(c *manager.Config) { c.Objects = &oneHeld{Objects: c.Objects, until: held} })
	s := f.create(`{"templateID":"base"}`)
	at := f.URL + "/sandboxes/" + s.SandboxID
	fork := func(query string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, at+"/fork"+query, strings.NewReader(`{"count":3,"timeout":60}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", f.key)
		res, err := f.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	res := fork("?stream=true")
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusCreated || res.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Fatalf("%s, %v", res.Status, res.Header)
	}
	lines, seen := json.NewDecoder(res.Body), map[int]string{}
	for len(seen) < 3 {
		var line wire.ForkLine
		if err := lines.Decode(&line); err != nil || line.Error != nil || line.Sandbox == nil || seen[line.Index] != "" {
			t.Fatalf("line %+v, %v, after %v", line, err, seen)
		}
		f.want(200, nil, "GET", "/sandboxes/"+line.Sandbox.SandboxID, "")
		if seen[line.Index] = line.Sandbox.SandboxID; len(seen) == 2 {
			close(held)
		}
	}
	if err := lines.Decode(&wire.ForkLine{}); !errors.Is(err, io.EOF) {
		t.Errorf("after the last line: %v", err)
	}
	f.want(400, nil, "POST", "/sandboxes/"+s.SandboxID+"/fork?stream=maybe", "")
	f.want(204, nil, "POST", "/sandboxes/"+s.SandboxID+"/pause", "")
	refused := fork("?stream=true")
	_ = refused.Body.Close()
	if refused.StatusCode != http.StatusConflict || !strings.HasPrefix(refused.Header.Get("Content-Type"), "application/json") {
		t.Errorf("of one that is paused: %s, %v", refused.Status, refused.Header)
	}
}

// oneHeld holds up the making of the second sandbox.
type oneHeld struct {
	sandboxes.Objects
	until <-chan struct{}
	made  atomic.Int32
}

func (o *oneHeld) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	if _, is := obj.(*agents.Sandbox); is && o.made.Add(1) == 2 {
		select {
		case <-o.until:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return o.Objects.Create(ctx, obj, opts...)
}

// TestPauseOfOneThatIsPaused changes nothing, in any mode, and names what would.
func TestPauseOfOneThatIsPaused(t *testing.T) {
	f := newFixture(t)
	s := f.create(`{"templateID":"base"}`)
	at := "/sandboxes/" + s.SandboxID
	f.want(204, nil, "POST", at+"/pause", "")
	for body, want := range map[string]string{"": "is already paused", `{"memory":true}`: "is already paused", `{"memory":false}`: "a connect with memory: false"} {
		status, text, _ := f.do("POST", at+"/pause", body)
		if status != 409 || !strings.Contains(text, "is already paused") || !strings.Contains(text, want) {
			t.Errorf("pause %s = %d %s", body, status, text)
		}
	}
	o, err := f.cluster.SandboxByID(t.Context(), sandbox.ID(s.SandboxID))
	if err != nil || (o.Spec.Barchan != nil && o.Spec.Barchan.Suspend == agents.SuspendFiles) {
		t.Errorf("it is to keep %+v, %v", o.Spec.Barchan, err)
	}
	f.want(200, nil, "GET", at, "")
	f.want(404, nil, "POST", "/sandboxes/i0000000000000000000/pause", `{"memory":false}`)
}

func TestSecretsOverTheWire(t *testing.T) {
	f := newFixture(t)
	own := f.create(`{"templateID":"base","envVars":{"A":"b"}}`)
	f.want(201, nil, "POST", "/sandboxes/"+own.SandboxID+"/fork", "{}") // the team's own

	s := f.create(`{"templateID":"base","envVars":{"A":"b"}}`)
	o, err := f.cluster.SandboxByID(t.Context(), sandbox.ID(s.SandboxID))
	if err != nil {
		t.Fatal(err)
	}
	pool.BindEnv(o, false) // as a SandboxClaim does
	if err := f.cluster.Update(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	at := "/sandboxes/" + s.SandboxID
	var snap api.Snapshot
	f.want(201, &snap, "POST", at+"/snapshots", "")
	if !snap.Secrets {
		t.Errorf("snapshot is %+v", snap)
	}
	if status, text, _ := f.do("POST", at+"/fork", "{}"); status != 403 || !strings.Contains(text, "allowSecrets") || strings.Contains(text, `"b"`) {
		t.Errorf("fork = %d %s", status, text)
	}
	f.want(403, nil, "POST", "/v2/sandboxes", `{"templateID":"`+snap.SnapshotID+`"}`)
	f.want(201, nil, "POST", "/v2/sandboxes", `{"templateID":"`+snap.SnapshotID+`","allowSecrets":true}`)
	f.want(201, nil, "POST", at+"/fork", `{"allowSecrets":true}`)
}
