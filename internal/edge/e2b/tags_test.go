package e2b

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// make builds a template by the stand-in, and returns the build's ID.
func (b *builder) make(request string) string {
	b.t.Helper()
	var build api.RequestedTemplateBuild
	b.want(202, &build, "POST", "/v3/templates", request)
	b.want(202, nil, "POST", "/v2/templates/"+build.TemplateID+"/builds/"+build.BuildID, `{"fromImage":"debian"}`)
	if err := b.build(b.t.Context(), b.buildObject(build.BuildID)); err != nil {
		b.t.Fatal(err)
	}
	return build.BuildID
}

// tags returns the tags of a template, with the number of the build that each refers to.
func (b *builder) tags(template string, made ...string) string {
	b.t.Helper()
	var list []api.TemplateTag
	b.want(200, &list, "GET", "/templates/"+template+"/tags", "")
	var got []string
	for _, tag := range list {
		n := 0
		for i, id := range made {
			if id == tag.BuildID {
				n = i + 1
			}
		}
		if tag.CreatedAt.IsZero() {
			b.t.Errorf("%+v has no time", tag)
		}
		got = append(got, fmt.Sprint(tag.Tag, "=", n))
	}
	return strings.Join(got, " ")
}

// restoring has a template start from the files of a checkpoint, as real builds do.
func (b *builder) restoring(template, checkpoint string) {
	b.t.Helper()
	o, c := &extensions.SandboxTemplate{}, &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: checkpoint}}
	if err := b.cluster.Get(b.t.Context(), types.NamespacedName{Namespace: team, Name: template}, o); err != nil {
		b.t.Fatal(err)
	}
	o.Spec.Barchan.Sandbox.Restore = &agents.RestoreSource{CheckpointName: checkpoint, FilesOnly: true}
	if err := errors.Join(b.cluster.Create(b.t.Context(), c), b.cluster.Update(b.t.Context(), o)); err != nil {
		b.t.Fatal(err)
	}
	eventually.NoError(b.t, "the checkpoint is ready", func() error { // the cluster, which finds no sandbox to capture, writes too
		err := b.cluster.Get(b.t.Context(), client.ObjectKeyFromObject(c), c)
		c.Status.Phase = barchan.CheckpointReady
		return errors.Join(err, b.cluster.Status().Update(b.t.Context(), c))
	})
}

func TestTags(t *testing.T) {
	f, files := newBuildFixture(t, builds.Config{})
	b := &builder{f, files}
	one := b.make(`{"name":"mine:v1","tags":["Stable","v1"]}`)
	if got := b.tags("mine", one); got != "stable=1 v1=1" {
		t.Errorf("after the first build: %s", got)
	}
	f.want(404, nil, "POST", "/sandboxes", `{"templateID":"mine"}`)
	two := b.make(`{"name":"mine","tags":["default","v2_x"]}`)
	if got := b.tags("mine", one, two); got != "default=2 stable=1 v1=1 v2_x=2" {
		t.Errorf("after the second build: %s", got)
	}
	b.restoring("mine", "files-of-two")
	var assigned api.AssignedTags
	f.want(201, &assigned, "POST", "/templates/tags", `{"target":"mine:default","tags":["stable","LATEST"]}`)
	if assigned.BuildID != two || fmt.Sprint(assigned.Tags) != "[stable latest]" {
		t.Errorf("assigned: %+v", assigned)
	}
	f.want(201, nil, "POST", "/templates/tags", `{"target":"team-a/mine:`+one+`","tags":["old"]}`)
	f.want(404, nil, "POST", "/templates/tags", `{"target":"mine:v9","tags":["old"]}`)
	if got := b.tags("mine", one, two); got != "default=2 latest=2 old=1 stable=2 v1=1 v2_x=2" {
		t.Errorf("after the assignments: %s", got)
	}
	var kept barchan.Checkpoint
	if err := f.cluster.Get(t.Context(), types.NamespacedName{Namespace: team, Name: "files-of-two"}, &kept); err != nil || barchan.ExactTime(&kept, barchan.AnnotationUsedAt).IsZero() {
		t.Errorf("the checkpoint is not marked as used: %v %v", err, kept.Annotations)
	}
	id := b.listed(one, two)
	b.removeTags(id, one, two)
}

// listed reads and uses the template that TestTags has built, and returns its ID.
func (b *builder) listed(one, two string) string {
	f, t := b.fixture, b.t
	var list []api.Template
	f.want(200, &list, "GET", "/templates", "")
	id := ""
	for _, one := range list {
		if strings.Contains(fmt.Sprint(one.Aliases), "mine") {
			id += one.TemplateID
			if fmt.Sprint(one.Aliases, one.Tags) != "[mine] [default latest old stable v1 v2_x]" || one.BuildID != two {
				t.Errorf("the list has %+v", one)
			}
		}
	}
	for _, ref := range []string{"mine", "mine:default", "mine:v1", "team-a/mine:v2_x", id + ":v1", "mine:" + one} {
		s := f.create(`{"templateID":"` + ref + `"}`)
		if s.TemplateID != id || request.Deref(s.Alias) != "mine" {
			t.Errorf("%s: the sandbox is %+v, want one of %s", ref, s, id)
		}
	}
	for _, unknown := range []string{"mine:v9", "mine.v1", "team-b/mine:v1", "mine:"} {
		f.want(404, nil, "POST", "/sandboxes", `{"templateID":"`+unknown+`"}`)
	}
	f.want(200, nil, "GET", "/templates/aliases/mine:v1", "")
	f.want(404, nil, "GET", "/templates/aliases/mine:v9", "")
	f.want(409, nil, "POST", "/v3/templates", `{"name":"mine.v1"}`) // its object is the tag's
	return id
}

// removeTags removes tags of the template that TestTags has built, and then the template.
func (b *builder) removeTags(id, one, two string) {
	f, t := b.fixture, b.t
	p := fakecluster.Pool(team, "uses-it", "", "mine.v1")
	if err := f.cluster.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	f.want(409, nil, "DELETE", "/templates/tags", `{"name":"mine","tags":["old","v1"]}`)
	f.want(409, nil, "DELETE", "/templates/mine", "")
	if got := b.tags("mine", one, two); !strings.Contains(got, "old=1") || !strings.Contains(got, "v1=1") {
		t.Errorf("a refused deletion has removed some: %s", got)
	}
	if err := f.cluster.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	f.want(204, nil, "DELETE", "/templates/tags", `{"name":"mine","tags":["old","v9"]}`)
	f.want(204, nil, "DELETE", "/templates/mine%3Alatest", "")
	f.want(400, nil, "DELETE", "/templates/mine%3Adefault", "")
	if got := b.tags(id, one, two); got != "default=2 stable=2 v1=1 v2_x=2" {
		t.Errorf("after the removals: %s", got)
	}
	f.want(204, nil, "DELETE", "/templates/mine", "")
	f.want(404, nil, "GET", "/templates/mine/tags", "")
	err := f.cluster.Get(t.Context(), types.NamespacedName{Namespace: team, Name: "mine.v1"}, &extensions.SandboxTemplate{})
	if client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the object of v1 after the deletion: %v", err)
	}
}

func TestCancelOfBuild(t *testing.T) {
	f, build := built(t)
	second, _, read := f.request("mine")
	f.want(204, nil, "DELETE", read, "")
	f.want(404, nil, "GET", read+"/status", "")
	f.want(404, nil, "DELETE", read, "")
	f.want(409, nil, "DELETE", strings.Replace(read, second.BuildID, build.BuildID, 1), "")
}
