package peers

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// forger speaks to a replica as it likes.
type forger struct {
	t      *testing.T
	to     *peer
	client *http.Client
}

func newForger(t *testing.T, to *peer, config *tls.Config) *forger {
	config = config.Clone()
	config.InsecureSkipVerify, config.VerifyConnection = true, nil
	transport := &http.Transport{TLSClientConfig: config}
	t.Cleanup(transport.CloseIdleConnections)
	return &forger{t, to, &http.Client{Transport: transport, Timeout: eventually.Patience}}
}

func (f *forger) do(method, path, kind string, body []byte) (int, error) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, "https://"+f.to.Self().Push.String()+path, bytes.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	resp, err := f.client.Do(req) //nolint:bodyclose // discard closes it
	if err != nil {
		return 0, err
	}
	discard(resp.Body)
	return resp.StatusCode, nil
}

func encode(t *testing.T, b push.Batch) []byte {
	t.Helper()
	text, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestForgedBatches(t *testing.T) {
	g := newGroup(t)
	all := g.members(3)
	to := all[0]
	before := count(t, to, "refused_total")
	me := newForger(t, to, all[1].trust.Client("r0"))
	good := push.Batch{
		Version: push.Version, From: "r1", Boot: all[1].Self().Boot, To: to.Self().Boot, Seq: 1 << 40,
		Routes: []push.Record{push.RecordOf(&push.Route{Route: testRoute(1, "5")})},
	}
	many := make([]push.Record, push.MaxBatch+1)
	for i := range many {
		many[i] = push.RecordOf(&push.Route{Route: testRoute(i, "1")})
	}
	absurd, foreign := push.RecordOf(&push.Route{Route: testRoute(2, "1")}), push.RecordOf(&push.Route{Route: testRoute(3, "1")})
	absurd.ResourceVersion = "9999999999999999999999"
	foreign.ID = testRoute(4, "").ID
	with := func(change func(*push.Batch)) []byte {
		b := good
		b.Seq++
		change(&b)
		return encode(t, b)
	}
	tests := []struct {
		name   string
		method string
		path   string
		kind   string
		body   []byte
		status int
		reason string
	}{
		{name: "not JSON", body: []byte("{"), status: 400, reason: refusedMalformed},
		{name: "other JSON", body: []byte("[]"), status: 400, reason: refusedMalformed},
		{name: "two in one", body: append(with(func(*push.Batch) {}), '{', '}'), status: 400, reason: refusedMalformed},
		{name: "another version of the protocol", body: with(func(b *push.Batch) { b.Version = 2 }), status: 400, reason: refusedMalformed},
		{name: "oversized", body: with(func(b *push.Batch) { b.Boot = strings.Repeat("x", push.MaxBody) }), status: 413, reason: refusedSize},
		{name: "too many routes", body: with(func(b *push.Batch) { b.Routes = many }), status: 413, reason: refusedRoutes},
		{name: "an absurd version after a good route", body: with(func(b *push.Batch) { b.Routes = append(b.Routes[:1:1], absurd) }), status: 400, reason: refusedMalformed},
		{name: "another's ID", body: with(func(b *push.Batch) { b.Routes = append(b.Routes[:1:1], foreign) }), status: 400, reason: refusedMalformed},
		{name: "in another member's name", body: with(func(b *push.Batch) { b.From, b.Boot = "r2", all[2].Self().Boot }), status: 403, reason: refusedName},
		{name: "in the receiver's name", body: with(func(b *push.Batch) { b.From = "r0" }), status: 403, reason: refusedName},
		{name: "from an earlier life", body: with(func(b *push.Batch) { b.Boot = "before" }), status: 409, reason: refusedBoot},
		{name: "for an earlier life", body: with(func(b *push.Batch) { b.To = "before" }), status: 409, reason: refusedBoot},
		{name: "elsewhere", path: "/", body: with(func(*push.Batch) {}), status: 404, reason: refusedRequest},
		{name: "by GET", method: http.MethodGet, body: with(func(*push.Batch) {}), status: 405, reason: refusedRequest},
		{name: "as a form", kind: "text/plain", body: with(func(*push.Batch) {}), status: 415, reason: refusedRequest},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			was := count(t, to, "refused_total", tt.reason)
			status, err := me.do(or(tt.method, http.MethodPost), or(tt.path, refreshPath), or(tt.kind, contentType), tt.body)
			if err != nil || status != tt.status {
				t.Errorf("status %d, %v, want %d", status, err, tt.status)
			}
			if now := count(t, to, "refused_total", tt.reason); now != was+1 {
				t.Errorf("%s counted %v times", tt.reason, now-was)
			}
		})
	}
	if n := to.table.Len() + int(to.taken.Load()); n != 0 {
		t.Fatalf("%d routes were applied", n)
	}
	if n := count(t, to, "refused_total") - before; n != float64(len(tests)) {
		t.Errorf("%v refused, want %d", n, len(tests))
	}

	// None of them has used up the number of a good one. That one is taken once.
	for i, want := range []int{http.StatusNoContent, http.StatusConflict, http.StatusConflict} {
		status, err := me.do(http.MethodPost, refreshPath, contentType, encode(t, good))
		if err != nil || status != want {
			t.Errorf("%d. time: %d, %v, want %d", i+1, status, err, want)
		}
		good.Seq -= uint64(i) // the third is older
	}
	if n := to.taken.Load(); n != 1 || count(t, to, "refused_total", refusedReplay) != 2 {
		t.Errorf("%d routes taken, %v replays", n, count(t, to, "refused_total", refusedReplay))
	}
}

// TestRunWaitsForHandlers: what takes routes has ended when Run returns, though it outlasts the time that
// a server has for its end.
func TestRunWaitsForHandlers(t *testing.T) {
	g := newGroup(t)
	entered, hold := make(chan struct{}, 1), make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	defer release()
	var left atomic.Bool
	cfg := g.config("r0", "127.0.0.10")
	cfg.KeyFile, cfg.reach = filepath.Join(g.dir, "keys"), g.reach("r0")
	cfg.OnRoutes = func(string, []push.Route) {
		signal(entered)
		<-hold
		left.Store(true)
	}
	slow := g.start(cfg)
	cfg = g.config("r1", "127.0.0.11")
	cfg.KeyFile, cfg.Seeds, cfg.reach = filepath.Join(g.dir, "keys"), []string{slow.Self().Gossip.String()}, g.reach("r1")
	other := g.start(cfg)
	g.eventually(func() bool { return len(slow.Members())+len(other.Members()) == 2 }, "joined")
	other.Push(testRoute(1, "1"))
	<-entered
	g.cut(slow, other, true) // it gets no leave message, and waits for a response
	before := count(t, other, "batches_total", resultFailed)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		slow.stop()
	}()
	g.eventually(func() bool { return count(t, other, "batches_total", resultFailed) > before }, "the connection has been closed")
	release()
	<-stopped
	if !left.Load() {
		t.Error("Run has returned before")
	}
}

// TestKeysChangedTogether: concurrent changes of a replica's keys wait for each other, messages
// to the members included.
func TestKeysChangedTogether(t *testing.T) {
	g := newGroup(t)
	all := g.members(2)
	key := NewKey()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := all[0].AddKey(t.Context(), key); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	g.eventually(func() bool { m := all[1].Members(); return len(m) == 1 && len(m[0].Keys) == 2 }, "the member has both keys")
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// TestReplayOverRestarts captures what was good, and sends it to the receiver's next life and
// after the sender's.
func TestReplayOverRestarts(t *testing.T) {
	g := newGroup(t)
	all := g.members(2)
	old := push.Batch{
		Version: push.Version, From: "r1", Boot: all[1].Self().Boot, To: all[0].Self().Boot, Seq: 1 << 40,
		Routes: []push.Record{push.RecordOf(&push.Route{Route: testRoute(1, "5")})},
	}
	trust := all[1].trust
	all[0].stop()
	cfg := all[0].cfg
	cfg.Metrics = g.config("", "127.0.0.1").Metrics
	again := g.start(cfg)
	g.eventually(func() bool { return len(again.Members()) == 1 }, "joined again")
	me := newForger(t, again, trust.Client("r0"))
	if status, err := me.do(http.MethodPost, refreshPath, contentType, encode(t, old)); err != nil || status != http.StatusConflict {
		t.Errorf("to the next life: %d, %v", status, err)
	}
	old.To = again.Self().Boot
	all[1].stop()
	g.eventually(func() bool { return len(again.Members()) == 0 }, "gone")
	if status, err := me.do(http.MethodPost, refreshPath, contentType, encode(t, old)); err != nil || status != http.StatusForbidden {
		t.Errorf("of one who left: %d, %v", status, err)
	}
	if again.table.Len() != 0 {
		t.Error("applied")
	}
}

func TestWrongCertificates(t *testing.T) {
	g := newGroup(t)
	to := g.members(1)[0]
	other, err := trust.Open("r1", trust.Source{Dir: filepath.Join(g.dir, "other")})
	if err != nil {
		t.Fatal(err)
	}
	// What the authority would give a web server: not for clients.
	web, err := localca.Open(localca.Config{Dir: filepath.Join(g.dir, "ca"), Names: []string{"r1"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		config *tls.Config
		reason string
	}{
		"none":             {&tls.Config{}, trust.RefusedNoCertificate},
		"other authority":  {other.Client("r0"), trust.RefusedCertificate},
		"not for a client": {asClient(t, web.TLSConfig()), trust.RefusedCertificate},
	} {
		was := count(t, to, "refused_total", tt.reason)
		f := newForger(t, to, tt.config)
		if status, err := f.do(http.MethodPost, refreshPath, contentType, []byte("{}")); err == nil {
			t.Errorf("%s: answered %d", name, status)
		}
		if now := count(t, to, "refused_total", tt.reason); now != was+1 {
			t.Errorf("%s: %s counted %v times", name, tt.reason, now-was)
		}
	}
	stranger, err := trust.Open("stranger", trust.Source{Dir: filepath.Join(g.dir, "ca")})
	if err != nil {
		t.Fatal(err)
	}
	f := newForger(t, to, stranger.Client("r0"))
	body := encode(t, push.Batch{Version: push.Version, From: "stranger", To: to.Self().Boot, Seq: 1})
	if status, err := f.do(http.MethodPost, refreshPath, contentType, body); err != nil || status != http.StatusForbidden || count(t, to, "refused_total", refusedMember) != 1 {
		t.Errorf("certified but no member: %d, %v", status, err)
	}
}

func asClient(t *testing.T, server *tls.Config) *tls.Config {
	cert, err := server.GetCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }}
}

// TestOtherAuthority has two members of one gossip key that trust different authorities: neither
// sends the other anything.
func TestOtherAuthority(t *testing.T) {
	g := newGroup(t)
	first := g.members(1)[0]
	cfg := g.config("r1", "127.0.0.31")
	cfg.KeyFile, cfg.TLS.Dir = filepath.Join(g.dir, "keys"), filepath.Join(g.dir, "other")
	cfg.Seeds = []string{first.Self().Gossip.String()}
	second := g.start(cfg)
	g.eventually(func() bool { return len(first.Members())+len(second.Members()) == 2 }, "joined")
	first.Push(testRoute(1, "1"))
	second.Push(testRoute(2, "1"))
	for _, p := range []*peer{first, second} {
		g.eventually(func() bool { return count(t, p, "batches_total", resultFailed) > 3 }, "pushes fail")
		if p.table.Len() != 0 || p.taken.Load() != 0 || count(t, p, "queued") != 1 {
			t.Errorf("%s: %d routes, %v queued", p.cfg.Name, p.table.Len(), count(t, p, "queued"))
		}
	}
}

// TestGivenCertificates uses files, and takes up renewed ones.
func TestGivenCertificates(t *testing.T) {
	g := newGroup(t)
	dir := filepath.Join(g.dir, "ca")
	give := func(name string) trust.Source {
		made, err := trust.Open(name, trust.Source{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		files := trust.Source{CAFile: filepath.Join(dir, localca.CertFile), CertFile: filepath.Join(g.dir, name+".crt"), KeyFile: filepath.Join(g.dir, name+".key")}
		pair, err := made.Certificate()
		if err != nil {
			t.Fatal(err)
		}
		writePair(t, files, pair)
		return files
	}
	a, b := g.config("a", "127.0.0.10"), g.config("b", "127.0.0.11")
	a.KeyFile, b.KeyFile = filepath.Join(g.dir, "keys"), filepath.Join(g.dir, "keys")
	a.TLS, b.TLS = give("a"), give("b")
	first := g.start(a)
	b.Seeds = []string{first.Self().Gossip.String()}
	second := g.start(b)
	g.eventually(func() bool { return len(first.Members()) == 1 }, "joined")
	g.pushed(first, second, 1)
	was, err := first.trust.Certificate()
	if err != nil {
		t.Fatal(err)
	}
	give("a")
	if now, err := first.trust.Certificate(); err != nil || now.Leaf.SerialNumber.Cmp(was.Leaf.SerialNumber) == 0 {
		t.Errorf("not taken up: %v", err)
	}
	wrong := g.config("c", "127.0.0.12")
	wrong.TLS, wrong.OnRoutes = a.TLS, func(string, []push.Route) {}
	if _, err := New(wrong); err == nil || !strings.Contains(err.Error(), "not for this replica") {
		t.Errorf("another's certificate: %v", err)
	}
}

func TestSecretFiles(t *testing.T) {
	g := newGroup(t)
	g.members(1)
	for _, name := range []string{"keys", "r0.state", "ca/" + localca.KeyFile} {
		g.eventually(func() bool { _, err := os.Stat(filepath.Join(g.dir, name)); return err == nil }, name)
		info, err := os.Stat(filepath.Join(g.dir, name))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	for content, want := range map[string]string{"{": "cannot be read", `{"keys":[]}`: "0 gossip keys", `{"keys":["eHg="]}`: "32 bytes"} {
		path := filepath.Join(g.dir, "bad")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openKeys(path, nil); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", content, err)
		}
	}
}

func TestRenewal(t *testing.T) {
	tr, err := trust.Open("r", trust.Source{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	first, _ := tr.Certificate()
	if again, _ := tr.Certificate(); again != first {
		t.Error("made again too early")
	}
	near := *first.Leaf
	near.NotAfter = time.Now().Add(trust.RenewBefore - time.Minute)
	tr.Mu.Lock()
	tr.Leaf = &tls.Certificate{Leaf: &near}
	tr.Mu.Unlock()
	if again, err := tr.Certificate(); err != nil || time.Until(again.Leaf.NotAfter) < trust.RenewBefore {
		t.Errorf("not made again: %v", err)
	}
}
