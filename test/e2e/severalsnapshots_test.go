package e2e

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// severalTemplate has a program beside the first one that keeps a number in memory only, and a volume of its own. The first
// one's warm-up, of the template with a pool, keeps the number of its seed.
const severalTemplate = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: %s}
spec:
  envVarsInjectionPolicy: Overrides
  %s
  podTemplate:
    spec:
      containers:
      - {name: main, image: "barchan.local/base:latest", command: [sleep, infinity], volumeMounts: [{name: shared, mountPath: /shared}]}
      - name: beside
        image: barchan.local/base:latest
        command: [sh, -c, 'n=$(od -An -N4 -tu4 /dev/urandom); echo number $n of $(hostname); echo volume > /own/kept; i=0; while :; do i=$((i+1)); echo $$ $n $i > /shared/new; mv /shared/new /shared/number; sleep 0.05; done']
        volumeMounts: [{name: shared, mountPath: /shared}, {name: own, mountPath: /own}]
      volumes:
      - {name: shared, emptyDir: {}}
      - {name: own, emptyDir: {}}
---
`

// numberBeside is the output of the program beside the first one, without its count, which must change.
func (s *server) numberBeside(id string) (number string) {
	s.t.Helper()
	before := s.exec(id, "cat /shared/number 2>/dev/null || true")
	eventually.NoError(s.t, "the program beside the first of "+id, func() error {
		now := s.exec(id, "cat /shared/number 2>/dev/null || true")
		if fields := strings.Fields(now); len(fields) == 3 && now != before {
			number = strings.Join(fields[:2], " ")
			return nil
		}
		return fmt.Errorf("%q, before %q", now, before)
	})
	return number
}

// nameOf is the name of a sandbox's object.
func (s *server) nameOf(id string) string {
	s.t.Helper()
	return s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={.items[?(@.status.barchan.id=="`+id+`")].metadata.name}`)
}

// inBeside runs a line in the second container, by kubectl.
func (s *server) inBeside(id, line string) string {
	s.t.Helper()
	return s.mustKubectl("", "exec", s.nameOf(id), "-c", "beside", "--", "sh", "-c", line)
}

// testSnapshotOfSeveral snapshots and forks a sandbox of two containers, and warms up a pool of such.
func testSnapshotOfSeveral(t *testing.T, s *server) {
	s.apply(fmt.Sprintf(severalTemplate, "duo", ""))
	id := s.create(s.localKey(), "duo")
	s.exec(id, startNumber)
	s.exec(id, "echo first > /home/user/kept")
	s.inBeside(id, "echo second > /tmp/kept")
	first, second := s.number(id), s.numberBeside(id)
	same := func(of string) {
		t.Helper()
		if a, b := s.number(of), s.numberBeside(of); a != first || b != second {
			t.Errorf("%s has the numbers %q and %q, the source had %q and %q", of, a, b, first, second)
		}
		if got := s.exec(of, "cat /home/user/kept; ls /tmp/kept 2>/dev/null || true"); got != "first" {
			t.Errorf("the first container of %s has %q", of, got)
		}
		if got := s.inBeside(of, "cat /tmp/kept /own/kept; hostname"); got != "second\nvolume\n"+s.nameOf(of)+"\n" {
			t.Errorf("the second container of %s has %q", of, got)
		}
		if got := s.must("logs", of, "-c", "beside"); !strings.Contains(got, "number "+strings.Fields(second)[1]) {
			t.Errorf("logs -c of %s: %q", of, got)
		}
	}
	snap := strings.TrimSpace(s.data("snapshot", id, "--name", "duo-loaded"))
	same(id)
	forks := strings.Fields(s.data("fork", id, "--count", "2"))
	for _, of := range append(forks, strings.TrimSpace(s.data("run", "--from", snap, "--keep"))) {
		same(of)
		s.inBeside(of, "echo changed > /tmp/kept")
		s.must("kill", of)
	}
	same(id)
	if out, err := s.try("snapshot", "export", snap, filepath.Join(t.TempDir(), "duo.tar")); exitCode(err) != 1 || !strings.Contains(out, "2 containers") {
		t.Errorf("snapshot export = %v\n%s", err, out)
	}
	uid := s.mustKubectl("", "get", "checkpoint", strings.ReplaceAll(snap, ":", "-"), "-o", "jsonpath={.metadata.uid}")
	pages := filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "checkpoints", uid, "memory", "pages.img")
	flipMiddle(t, pages)
	if status, out, _ := s.createFrom(s.localKey(), map[string]any{"templateID": snap}); status == http.StatusCreated || !strings.Contains(out, "damaged") {
		t.Errorf("of damaged memory: %d %s", status, out)
	}
	flipMiddle(t, pages)
	again := strings.TrimSpace(s.data("run", "--from", snap, "--keep"))
	same(again)
	s.must("kill", id, again)
	s.must("snapshot", "rm", snap)
	s.wantNoCheckpoints()
	s.mustKubectl("", "delete", "sandboxtemplate", "duo", patience)
	testWarmUpOfSeveral(t, s)
}

// testWarmUpOfSeveral: members of a pool have the memory of all containers of their seed.
func testWarmUpOfSeveral(t *testing.T, s *server) {
	const warmUp = `barchan: {sandbox: {warmUp: {command: [sh, -c, 'until cut -d" " -f1,2 /shared/number > /tmp/warmed; do sleep 0.1; done']}}}`
	s.apply(fmt.Sprintf(severalTemplate, "warm-duo", warmUp) + fmt.Sprintf(fixturePool, "warm-duo", 2, "warm-duo"))
	s.mustKubectl("", "wait", "sandboxwarmpool/warm-duo", "--for=jsonpath={.status.readyReplicas}=2", patience)
	var seen []string
	for range 2 {
		id := s.create(s.localKey(), "warm-duo")
		seen = append(seen, s.exec(id, "cat /tmp/warmed"), s.numberBeside(id))
		s.must("kill", id)
	}
	for _, number := range seen {
		if number != seen[0] || number == "" {
			t.Errorf("the numbers of two members are %q, want those of one seed", seen)
			break
		}
	}
	s.mustKubectl("", "delete", "sandboxwarmpool/warm-duo", "sandboxtemplate/warm-duo", patience)
	s.wantNoCheckpoints()
}
