package e2b

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/manager"
	managed "github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
)

// TestForeignIDs asks each route that names an object for one of another tenant, and for one that does not exist: both are refused in
// the same words, and the object is as it was.
func TestForeignIDs(t *testing.T) {
	files, err := builds.Open(builds.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	e := newEventFixture(t, func(c *manager.Config) { c.BuildFiles, c.VolumeFiles = files, noFiles{} })
	b := &builder{e.fixture, files}
	box := e.create(`{"templateID":"base"}`)
	var (
		snapshot struct{ SnapshotID string }
		build    api.RequestedTemplateBuild
		volumes  []struct{ VolumeID string }
		key      api.CreatedAPIKey
		hook     struct{ ID string }
	)
	e.want(201, &snapshot, "POST", "/sandboxes/"+box.SandboxID+"/snapshots", `{"name":"kept"}`)
	e.want(202, &build, "POST", "/v3/templates", `{"name":"mine"}`)
	e.want(202, nil, "POST", "/v2/templates/"+build.TemplateID+"/builds/"+build.BuildID, `{"fromImage":"debian"}`)
	if err := b.build(t.Context(), b.buildObject(build.BuildID)); err != nil {
		t.Fatal(err)
	}
	if err := e.cluster.Create(t.Context(), &barchan.Volume{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "data"}}); err != nil {
		t.Fatal(err)
	}
	e.want(200, &volumes, "GET", "/volumes", "")
	e.want(201, &key, "POST", "/api-keys", `{"name":"k"}`)
	e.want(201, &hook, "POST", "/events/webhooks", `{"name":"h","url":"http://127.0.0.1:1/","events":["sandbox.lifecycle.created"],"signatureSecret":"0123456789abcdef0123456789abcdef"}`)

	theirs := map[string][]string{
		"sandboxID": {box.SandboxID}, "templateID": {build.TemplateID, snapshot.SnapshotID, "mine"}, "buildID": {build.BuildID}, "volumeID": {volumes[0].VolumeID},
		"apiKeyID": {key.ID}, "accessTokenID": {key.ID}, "webhookID": {hook.ID}, "teamID": {team}, "alias": {"mine"},
	}
	none := map[string][]string{
		"sandboxID": {"i0000000000000000000"}, "templateID": {"t0000000000000000000", "kept:000000000000", "none"}, "buildID": {missing}, "volumeID": {"v0000000000000000000"},
		"apiKeyID": {missing}, "accessTokenID": {missing}, "webhookID": {missing}, "teamID": {"team-x"}, "alias": {"none"},
	}
	before := e.ofOwner(box.SandboxID, key.ID)
	sent := 0
	for route := range rightsOf {
		method, path, _ := strings.Cut(route, " ")
		if strings.HasSuffix(path, "/files/{hash}") { // it is about files of the caller, whatever the template
			continue
		}
		absent := fill(path, none)
		for i, asks := range fill(path, theirs) {
			sent++
			status, text, _ := e.do(method, asks.path, foreignBodies[route], "X-API-Key", e.other)
			same, words, _ := e.do(method, absent[i].path, foreignBodies[route], "X-API-Key", e.other)
			empty := status == 200 && text == "[]"+"\n"
			if !empty && (status != 404 && status != 403 || same != status || asks.without(text) != absent[i].without(words)) {
				t.Errorf("%s %s: %d %s, and %d %s for one that does not exist", method, asks.path, status, text, same, words)
			}
		}
	}
	if sent < 50 {
		t.Errorf("%d requests were sent", sent)
	}
	e.refusesInBodies(snapshot.SnapshotID, build.TemplateID)
	if after := e.ofOwner(box.SandboxID, key.ID); after != before {
		t.Errorf("the owner had\n%s\nand has\n%s", before, after)
	}
}

// refusesInBodies names another tenant's objects in bodies.
func (e *eventFixture) refusesInBodies(snapshot, template string) {
	for _, body := range []string{
		fmt.Sprintf(`POST /v2/sandboxes {"templateID":%q}`, snapshot), fmt.Sprintf(`POST /v2/sandboxes {"templateID":%q}`, template),
		`POST /v2/sandboxes {"templateID":"mine"}`, `POST /v2/sandboxes {"templateID":"team-a/mine"}`,
		`POST /v2/sandboxes {"templateID":"base","volumeMounts":[{"name":"data","path":"/data"}]}`,
		`POST /templates/tags {"target":"mine","tags":["x"]}`, `POST /templates/tags {"target":"team-a/mine","tags":["x"]}`, `DELETE /templates/tags {"name":"mine","tags":["default"]}`,
	} {
		request, body, _ := strings.Cut(body, " {")
		method, path, _ := strings.Cut(request, " ")
		if status, text, _ := e.do(method, path, "{"+body, "X-API-Key", e.other); status/100 != 4 {
			e.t.Errorf("%s {%s: %d %s", request, body, status, text)
		}
	}
}

// missing is the ID of nothing.
const missing = "00000000-0000-4000-8000-000000000000"

// foreignBodies are the bodies, or queries, without which a route refuses every request.
var foreignBodies = map[string]string{
	"POST /sandboxes/{sandboxID}/connect": `{"timeout":60}`, "POST /v2/sandboxes/{sandboxID}/connect": `{"timeout":60}`, "POST /sandboxes/{sandboxID}/timeout": `{"timeout":60}`,
	"POST /sandboxes/{sandboxID}/resume": `{"timeout":60}`, "POST /sandboxes/{sandboxID}/fork": `{}`, "POST /sandboxes/{sandboxID}/snapshots": `{}`, "PUT /sandboxes/{sandboxID}/network": `{}`,
	"PATCH /api-keys/{apiKeyID}": `{"name":"x"}`, "PATCH /events/webhooks/{webhookID}": `{"name":"x"}`, "POST /v2/templates/{templateID}/builds/{buildID}": `{"fromImage":"debian"}`,
	"PATCH /templates/{templateID}": `{"public":true}`, "PATCH /v2/templates/{templateID}": `{"public":true}`,
}

// ofOwner returns what the owner sees of its objects.
func (e *eventFixture) ofOwner(box, key string) string {
	var all strings.Builder
	for _, path := range []string{"/sandboxes/" + box, "/snapshots", "/templates", "/templates/mine/tags", "/volumes", "/events/webhooks"} {
		_, text, _ := e.do("GET", path, "")
		fmt.Fprintln(&all, path, text)
	}
	_, keys, _ := e.do("GET", "/api-keys", "") // whose last use changes
	fmt.Fprintln(&all, strings.Contains(keys, key))
	return all.String()
}

// noFiles are the files of volumes in a test that reads none.
type noFiles struct{ managed.Files }

// asked is a request's path, with the IDs in it.
type asked struct {
	path string
	ids  []string
}

// without returns a text without the IDs.
func (a asked) without(text string) string {
	for _, id := range a.ids {
		text = strings.ReplaceAll(text, id, "ID")
	}
	return text
}

// fill returns a path with each of the values for its parameters; none if it has no parameters.
func fill(path string, values map[string][]string) []asked {
	all := []asked{{path: path}}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if !strings.Contains(path, "{"+name+"}") {
			continue
		}
		var next []asked
		for _, a := range all {
			for _, id := range values[name] {
				next = append(next, asked{strings.ReplaceAll(a.path, "{"+name+"}", id), append(slices.Clip(a.ids), id)})
			}
		}
		all = next
	}
	if len(all[0].ids) == 0 {
		return nil
	}
	for i := range all {
		switch {
		case strings.HasSuffix(path, "/metrics/max"):
			all[i].path += "?metric=concurrent_sandboxes"
		case strings.HasSuffix(path, "/network/trace"):
			all[i].path += "?destination=192.0.2.1:443"
		}
	}
	return all
}
