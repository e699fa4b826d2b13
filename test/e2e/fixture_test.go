package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/s3"
)

// witness is a program that cannot be mistaken for another: it serves a word that it made up at its
// start, and the number of requests.
const witness = `
import http.server, os
nonce, served = os.urandom(8).hex(), 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global served
        if self.path == "/exit":
            os._exit(3)
        served += 1
        body = f"{nonce} {served}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("", int(os.environ.get("PORT", 8080))), Handler).serve_forever()
`

const (
	witnessPort = 8080
	besidePort  = 8090 // of the witness in a sidecar
)

// fixtureTemplate is a template of sandboxes that run a witness.
const fixtureTemplate = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: %s}
spec:
  envVarsInjectionPolicy: Overrides
  podTemplate:
    spec:
      %s
      containers:
      - name: main
        image: ` + baseImage + `
        command: [python3, -c, %s]
        resources: {limits: {memory: 256Mi}}
---
`

// preparedTemplate has init containers, a sidecar with a witness of its own, and a volume of a Secret.
const preparedTemplate = `
apiVersion: v1
kind: Secret
metadata: {name: prepared}
stringData: {text: by-init}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: prepared}
spec:
  envVarsInjectionPolicy: Overrides
  podTemplate:
    spec:
      initContainers:
      - name: make
        image: ` + baseImage + `
        command: [cp, /from/text, /work/made]
        volumeMounts: [{name: work, mountPath: /work}, {name: from, mountPath: /from}]
      containers:
      - name: main
        image: ` + baseImage + `
        command: [python3, -c, %s]
        resources: {limits: {memory: 256Mi}}
        volumeMounts: [{name: work, mountPath: /work}]
      - name: beside
        image: ` + baseImage + `
        command: [python3, -c, %s]
        resources: {limits: {memory: 128Mi}}
      volumes:
      - {name: work, emptyDir: {}}
      - {name: from, secret: {secretName: prepared}}
---
`

// fixturePool is a pool of a template.
const fixturePool = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: %s}
spec:
  replicas: %d
  sandboxTemplateRef: {name: %s}
---
`

// fixtureMembers is how many members the fixture's pool holds.
const fixtureMembers = 2

// fixture is a server with pools and with bystanders: sandboxes that must survive every crash.
type fixture struct {
	*server
	armed   string // the file that names the server's failpoint
	since   int64  // bytes of the log when that was written
	key     string
	objects client.Client
	buckets *s3.Server // has the bucket crash
	// running, paused and claimed are bystanders' IDs; claimed belongs to a SandboxClaim.
	running, paused, claimed string
	nonce                    map[string]string // by ID
}

// in is the fixture for a subtest, which then fails alone.
func (w *fixture) in(t *testing.T) *fixture {
	c := *w
	c.server = w.server.in(t)
	return &c
}

// newFixture starts a server with points, pools and bystanders.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	return newFixtureOf(t, programWithPoints(t))
}

// newFixtureOf is newFixture of a program.
func newFixtureOf(t *testing.T, bin string) *fixture {
	t.Helper()
	s := newServer(t)
	w := &fixture{server: s, armed: filepath.Join(s.dir, "armed"), nonce: map[string]string{}}
	s.bin = bin
	s.set(failpoint.Variable, "@"+w.armed)
	s.set("BARCHAN_STORE_AFTER", "50ms")
	s.set("BARCHAN_WEBHOOK_ALLOW", "127.0.0.0/8")
	w.buckets = s3.Start(t, "crash")
	s.set("BARCHAN_VOLUME_ENDPOINTS", w.buckets.Address)
	s.start()
	s.must("image", "build", "base")
	w.key, w.objects = s.localKey(), s.client()
	code, err := json.Marshal(witness)
	if err != nil {
		t.Fatal(err)
	}
	beside := strings.Replace(string(code), strconv.Itoa(witnessPort), strconv.Itoa(besidePort), 1)
	s.apply(fmt.Sprintf(fixtureTemplate, "cold", "", code) + fmt.Sprintf(fixtureTemplate, "warm", "", code) + fmt.Sprintf(fixtureTemplate, "rare", "", code) +
		fmt.Sprintf(fixtureTemplate, "again", "restartPolicy: Always", code) + fmt.Sprintf(preparedTemplate, code, beside) + fmt.Sprintf(fixtureTemplate, "once", "restartPolicy: Never", code) +
		fmt.Sprintf(fixturePool, "warm-pool", fixtureMembers, "warm") + fmt.Sprintf(fixturePool, "rare-pool", 0, "rare"))
	w.calm()
	w.running, w.paused = s.create(w.key, "warm"), s.create(w.key, "cold")
	for _, id := range []string{w.running, w.paused} {
		w.nonce[id], _ = w.meet(id)
	}
	claim := newSubject("bystander")
	if err := claimObject.do(t.Context(), w, claim); err != nil {
		t.Fatal(err)
	}
	w.claimed = claim.id
	w.nonce[claim.id], _ = w.meet(claim.id)
	w.pause(w.paused)
	w.stored(w.paused)
	w.calm()
	return w
}

// discardLogs discards the logs of controller-runtime, whose SetLogger races with itself.
var discardLogs = sync.OnceFunc(func() { ctrllog.SetLogger(logr.Discard()) })

// client accesses the Kubernetes API as its administrator.
func (s *server) client() client.Client {
	s.t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(s.value("BARCHAN_DATA_DIR"), "credentials", "admin.kubeconfig"))
	if err != nil {
		s.t.Fatal(err)
	}
	cfg.Timeout, cfg.QPS = eventually.Patience, -1
	discardLogs()
	scheme, err := cache.NewScheme()
	if err != nil {
		s.t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// send makes one request of the REST API; an answer that is no success is an error.
func (w *fixture) send(ctx context.Context, method, path, idempotency string, body, into any) (int, error) {
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, err
		}
		in = bytes.NewReader(b)
	}
	ctx, cancel := context.WithTimeout(ctx, eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+w.http+path, in)
	if err != nil {
		return 0, err
	}
	req.Header.Set("X-API-Key", w.key)
	req.Header.Set("Content-Type", "application/json")
	if idempotency != "" {
		req.Header.Set("Idempotency-Key", idempotency)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return 0, err
	case resp.StatusCode/100 != 2:
		return resp.StatusCode, fmt.Errorf("%s %s: %d %s", method, path, resp.StatusCode, b)
	case into != nil:
		return resp.StatusCode, json.Unmarshal(b, into)
	}
	return resp.StatusCode, nil
}

// query queries the witness of a sandbox through the gateway.
func (w *fixture) query(id string) (nonce string, served int, err error) {
	return w.queryAt(id, witnessPort)
}

func (w *fixture) queryAt(id string, port int) (nonce string, served int, err error) {
	status, body, err := w.visit(id, port, "/")
	if err != nil {
		return "", 0, err
	}
	nonce, number, ok := strings.Cut(body, " ")
	if status != http.StatusOK || !ok {
		return "", 0, fmt.Errorf("%d %s", status, body)
	}
	served, err = strconv.Atoi(number)
	return nonce, served, err
}

// meet waits for a witness to answer.
func (w *fixture) meet(id string) (nonce string, served int) { return w.meetAt(id, witnessPort) }

func (w *fixture) meetAt(id string, port int) (nonce string, served int) {
	w.t.Helper()
	eventually.NoError(w.t, fmt.Sprintf("the witness of %s at port %d answers", id, port), func() (err error) {
		nonce, served, err = w.queryAt(id, port)
		return err
	})
	return nonce, served
}

// meetAll is meet for a subject's nonces, of one that a sidecar has too.
func (w *fixture) meetAll(id string, s *subject) (nonces string, served int) {
	w.t.Helper()
	nonces, served = w.meet(id)
	if s.several {
		beside, _ := w.meetAt(id, besidePort)
		nonces += " " + beside
	}
	return nonces, served
}

func (w *fixture) pause(id string) {
	w.t.Helper()
	if _, err := w.send(w.t.Context(), http.MethodPost, "/sandboxes/"+id+"/pause", "", nil, nil); err != nil {
		w.t.Fatal(err)
	}
}

// stored waits until the memory of a sandbox is on disk.
func (w *fixture) stored(id string) {
	w.t.Helper()
	eventually.NoError(w.t, "the memory of "+id+" is on disk", func() error {
		if b := w.object(id).Status.Barchan; b == nil || b.Memory != agents.MemoryOnDisk {
			return errors.New("it is not")
		}
		return nil
	})
}

// boxes are all sandboxes' objects.
func (w *fixture) boxes() []agents.Sandbox {
	w.t.Helper()
	var list agents.SandboxList
	if err := w.objects.List(w.t.Context(), &list); err != nil {
		w.t.Fatalf("list sandboxes: %v\n%s", err, w.tail())
	}
	return list.Items
}

func idOf(s *agents.Sandbox) string { return string(sandbox.IDOf(s.UID)) }

// object is the object of a sandbox.
func (w *fixture) object(id string) *agents.Sandbox {
	w.t.Helper()
	x, err := w.find(w.t.Context(), id)
	w.need(err)
	return x
}

// find is object for any goroutine.
func (w *fixture) find(ctx context.Context, id string) (*agents.Sandbox, error) {
	var list agents.SandboxList
	if err := w.objects.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	i := slices.IndexFunc(list.Items, func(x agents.Sandbox) bool { return idOf(&x) == id })
	if i < 0 {
		return nil, fmt.Errorf("sandbox %s has no object", id)
	}
	return &list.Items[i], nil
}

// subjects are the IDs of sandboxes that are neither bystanders nor members.
func (w *fixture) subjects() (ids []string) {
	w.t.Helper()
	for _, x := range w.boxes() {
		if id := idOf(&x); !isMember(&x) && id != w.running && id != w.paused && id != w.claimed {
			ids = append(ids, id)
		}
	}
	return ids
}

// removeObject deletes a sandbox's object, or what owns it, and waits until it is gone.
func (w *fixture) removeObject(id string) {
	w.t.Helper()
	x := w.object(id)
	var o client.Object = x
	if owner := metav1.GetControllerOf(x); owner != nil {
		o = &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: x.Namespace, Name: owner.Name}}
	}
	if err := client.IgnoreNotFound(w.objects.Delete(w.t.Context(), o)); err != nil {
		w.t.Fatal(err)
	}
	w.gone(id)
}

// gone waits until a sandbox has no object.
func (w *fixture) gone(id string) {
	w.t.Helper()
	eventually.NoError(w.t, "sandbox "+id+" goes", func() error {
		if slices.ContainsFunc(w.boxes(), func(x agents.Sandbox) bool { return idOf(&x) == id }) {
			return errors.New("it is there")
		}
		return nil
	})
}

// calm waits until the pool is full, and nothing comes or goes.
func (w *fixture) calm() {
	w.t.Helper()
	eventually.NoError(w.t, "the pool is full and at rest", func() error {
		var p extensions.SandboxWarmPool
		if err := w.objects.Get(w.t.Context(), client.ObjectKey{Namespace: "default", Name: "warm-pool"}, &p); err != nil {
			return err
		}
		members := 0
		for _, x := range w.boxes() {
			if x.DeletionTimestamp != nil {
				return fmt.Errorf("sandbox %s is going", x.Name)
			}
			if isMember(&x) {
				members++
				if !sandbox.Ready(&x) {
					return fmt.Errorf("member %s is %s", x.Name, sandbox.PhaseOf(&x))
				}
			}
		}
		if p.Spec.Replicas == nil || members != int(*p.Spec.Replicas) || int(p.Status.ReadyReplicas) != members || p.Status.ObservedGeneration < p.Generation {
			return fmt.Errorf("%d members, status %+v", members, p.Status)
		}
		return nil
	})
}

// bystander is what must not change about one.
type bystander struct {
	id, name string
	spec     agents.SandboxSpec
	labels   map[string]string
	owners   []metav1.OwnerReference
	address  []string
	phase    sandbox.Phase
	served   int
}

func (w *fixture) bystanders() (all []bystander) {
	w.t.Helper()
	for _, id := range []string{w.running, w.paused, w.claimed} {
		x := w.object(id)
		b := bystander{id: id, name: x.Name, spec: x.Spec, labels: x.Labels, owners: x.OwnerReferences, phase: sandbox.PhaseOf(x)}
		b.address = append(b.address, x.Status.PodIPs...)
		if id != w.paused {
			_, b.served = w.meet(id)
		}
		all = append(all, b)
	}
	return all
}

// same verifies that the bystanders are unchanged: the same processes, at the same address, with the same
// owner and timeout, and reachable at once.
func (w *fixture) same(before []bystander) {
	w.t.Helper()
	for _, b := range before {
		x := w.object(b.id)
		now := bystander{b.id, x.Name, x.Spec, x.Labels, x.OwnerReferences, x.Status.PodIPs, sandbox.PhaseOf(x), b.served}
		if !reflect.DeepEqual(now, b) {
			w.t.Errorf("bystander %s is\n%+v\nwas\n%+v", b.id, now, b)
		}
		if b.id == w.paused {
			continue
		}
		nonce, served, err := w.query(b.id)
		if err != nil || nonce != w.nonce[b.id] || served <= b.served {
			w.t.Errorf("bystander %s returned %s, %d, %v; before: %s, %d", b.id, nonce, served, err, w.nonce[b.id], b.served)
		}
	}
}

// resumeBystanders resumes the paused bystander.
func (w *fixture) resumeBystanders() {
	w.t.Helper()
	if _, err := w.send(w.t.Context(), http.MethodPost, "/sandboxes/"+w.paused+"/connect", "", map[string]any{"timeout": 3600}, nil); err != nil {
		w.t.Fatal(err)
	}
	if nonce, _ := w.meet(w.paused); nonce != w.nonce[w.paused] {
		w.t.Errorf("the paused bystander returned %s, it was %s", nonce, w.nonce[w.paused])
	}
	w.clean()
}

// only verifies that there is no sandbox but bystanders, members and the subject, if that has one.
func (w *fixture) only(s *subject) {
	w.t.Helper()
	eventually.NoError(w.t, "there is no sandbox too many", func() error {
		if ids := w.subjects(); len(ids) > 1 || len(ids) == 1 && ids[0] != s.id {
			return fmt.Errorf("sandboxes %v, the subject is %q", ids, s.id)
		}
		return nil
	})
}

// clean waits until the audit finds nothing.
func (w *fixture) clean() {
	w.t.Helper()
	eventually.NoError(w.t, "the audit finds nothing", func() error {
		var found []adminclient.Finding
		out, err := w.try("doctor", "--deep", "--json")
		if err == nil {
			err = json.Unmarshal([]byte(out), &found)
		}
		if err != nil || len(found) > 0 {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
}
