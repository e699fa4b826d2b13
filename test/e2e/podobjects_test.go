package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const objectsManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: objects}
spec:
  podTemplate:
    metadata: {labels: {app: objects}}
    spec:
      securityContext: {fsGroup: 1000}
      containers:
      - name: main
        image: barchan.local/base:latest
        resources: {limits: {memory: 512Mi}}
        env:
        - {name: TOKEN, valueFrom: {secretKeyRef: {name: login, key: token}}}
        - {name: BEARER, value: Bearer $(TOKEN)}
        - {name: COLOR, valueFrom: {configMapKeyRef: {name: looks, key: color}}}
        - {name: NONE, valueFrom: {configMapKeyRef: {name: absent, key: x, optional: true}}}
        - {name: APP, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}}
        - {name: MEM, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Mi}}}
        envFrom:
        - {prefix: LOOK_, configMapRef: {name: looks}}
        - {secretRef: {name: absent, optional: true}}
        command: [sh, -c, 'exec 9< /etc/login/token; until [ -e /tmp/read ]; do sleep 0.1; done; cat <&9 > /tmp/had; exec sleep infinity']
        volumeMounts:
        - {name: login, mountPath: /etc/login}
        - {name: looks, mountPath: /etc/looks}
        - {name: looks, mountPath: /etc/size, subPath: size}
        - {name: pod, mountPath: /etc/pod}
      volumes:
      - {name: login, secret: {secretName: login, defaultMode: 0400}}
      - {name: looks, configMap: {name: looks}}
      - name: pod
        projected:
          sources:
          - downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}
          - configMap: {name: looks, items: [{key: color, path: deep/color}]}
          - secret: {name: absent, optional: true}
`

// testPodObjects has a sandbox take variables and files from Secrets and ConfigMaps, as a Pod does.
func testPodObjects(t *testing.T, s *server) {
	const value, next = "swordfish-4711", "marlin-0815"
	s.mustKubectl(objectsManifest, "apply", "-f", "-")
	waits := func(reason, message string) {
		t.Helper()
		eventually.NoError(t, "it waits for "+message, func() error {
			if got := s.condition("objects", "Ready"); got != "False "+reason+": "+message {
				return fmt.Errorf("Ready is %q", got)
			}
			return nil
		})
	}
	waits("FailedMount", `MountVolume.SetUp failed for volume "login" : secret "login" not found`)
	s.mustKubectl("", "create", "configmap", "looks", "--from-literal=color=blue", "--from-literal=size=9")
	s.mustKubectl("", "create", "secret", "generic", "login", "--from-literal=user=me")
	waits("CreateContainerConfigError", "couldn't find key token in Secret default/login")
	if out := s.mustKubectl("", "get", "events", "--field-selector=involvedObject.name=objects"); !strings.Contains(out, "Error: couldn't find key token in Secret default/login") || !strings.Contains(out, "FailedMount") {
		t.Errorf("events:\n%s", out)
	}
	s.mustKubectl("", "patch", "secret", "login", "--type=merge", "-p", `{"stringData":{"token":"`+value+`"}}`)
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/objects", patience)
	inside := func(line string) string {
		t.Helper()
		return s.mustKubectl("", "exec", "objects", "--", "sh", "-c", line)
	}
	if got := inside(`echo "$BEARER,$COLOR,$NONE,$LOOK_size,$APP,$MEM"`); got != "Bearer "+value+",blue,,9,objects,512\n" {
		t.Errorf("its variables: %q", got)
	}
	if got := inside("cat /etc/login/token /etc/looks/color /etc/size /etc/pod/labels /etc/pod/deep/color; stat -Lc ' %a %g' /etc/login/token; mount | grep -c ' /etc/looks '; sudo touch /etc/login/x 2>&1; true"); !strings.HasPrefix(got, value+"blue9app=\"objects\"blue 440 1000\n1\n") || !strings.Contains(got, "Read-only") {
		t.Errorf("its files: %q", got)
	}
	follows := func(path, want string) {
		t.Helper()
		eventually.NoError(t, path+" is "+want, func() error {
			if got := inside("cat " + path); got != want {
				return fmt.Errorf("it has %q", got)
			}
			return nil
		})
	}
	fork := s.mustFork(s.idOf("objects"), 1, nil)[0] // with the file of a Secret open
	if got := s.exec(fork.SandboxID, "cat /etc/login/token; echo $TOKEN"); got != value+value {
		t.Errorf("its fork has %q", got)
	}
	s.mustKubectl("", "patch", "configmap", "looks", "--type=merge", "-p", `{"data":{"color":"green","size":"10"}}`)
	follows("/etc/looks/color /etc/pod/deep/color /etc/size", "greengreen9") // a subPath stays

	for _, mode := range []string{"Suspended", "Running"} { // with the file of a Secret open
		s.mustKubectl("", "patch", "sandbox", "objects", "--type=merge", "-p", `{"spec":{"operatingMode":"`+mode+`"}}`)
		if mode == "Suspended" {
			s.onDisk(s.idOf("objects"))
			s.mustKubectl("", "patch", "secret", "login", "--type=merge", "-p", `{"stringData":{"token":"`+next+`"}}`)
		}
	}
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/objects", patience)
	follows("/etc/login/token", next)
	inside("touch /tmp/read; until [ -s /tmp/had ]; do sleep 0.1; done")
	if got := inside("cat /tmp/had; echo $TOKEN"); got != value+value+"\n" {
		t.Errorf("what it had open, and its variable: %q", got)
	}
	s.mustKubectl("", "delete", "secret", "login")
	follows("/etc/login/token", next)

	log, err := os.ReadFile(s.log.Name())
	if err != nil {
		t.Fatal(err)
	}
	for _, where := range []string{s.mustKubectl("", "get", "sandbox,pod,events", "-o", "yaml"), s.must("show", s.idOf("objects")), string(log)} {
		if strings.Contains(where, value) || strings.Contains(where, next) {
			t.Errorf("a value of a Secret is in\n%s", where)
		}
	}
	if journal, err := os.ReadFile(filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "node.db")); err != nil || bytes.Contains(journal, []byte(value)) || !bytes.Contains(journal, []byte("secretKeyRef")) {
		t.Errorf("the journal has a value, or no reference: %v", err)
	}
	s.must("kill", fork.SandboxID)
	s.mustKubectl("", "delete", "sandbox/objects", "configmap/looks", patience)

	template := strings.NewReplacer("agents.x-k8s.io", "extensions.agents.x-k8s.io", "kind: Sandbox", "kind: SandboxTemplate").Replace(objectsManifest)
	s.mustKubectl(template, "apply", "-f", "-")
	if status, text := s.call(s.localKey(), "POST", "/sandboxes", map[string]any{"templateID": "objects"}); status != 503 || !strings.Contains(text, `secret \"login\" not found`) {
		t.Errorf("a create without its Secret: %d %s", status, text)
	}
	s.mustKubectl("", "delete", "sandboxtemplate", "objects", patience)
}

const initManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: prepared}
spec:
  podTemplate:
    spec:
      initContainers:
      - name: first
        image: barchan.local/base:latest
        env: [{name: WHO, valueFrom: {secretKeyRef: {name: who, key: name}}}]
        command: [sh, -c, 'echo "first by $WHO in $(hostname)" > /work/log; touch /root-file 2>/dev/null; until [ -e /gate/open ]; do sleep 0.1; done']
        volumeMounts: [{name: work, mountPath: /work}, {name: gate, mountPath: /gate}]
      - name: second
        image: barchan.local/base:latest
        terminationMessagePolicy: FallbackToLogsOnError
        securityContext: {runAsUser: 0}
        command: [sh, -c, 'ip -4 addr | grep -c "inet 10" >> /work/log; curl -s -o /dev/null --max-time 1 http://127.0.0.1:1; echo the gate says $(cat /gate/open) >&2; [ "$(cat /gate/open)" = yes ] || exit 3; id -u >> /work/log']
        volumeMounts: [{name: work, mountPath: /work, subPath: .}, {name: gate, mountPath: /gate}]
      containers:
      - name: main
        image: barchan.local/base:latest
        command: [sh, -c, 'echo main >> /work/log; exec sleep infinity']
        readinessProbe: {exec: {command: [grep, main, /work/log]}, periodSeconds: 1}
        volumeMounts: [{name: work, mountPath: /work}]
      volumes:
      - {name: work, emptyDir: {}}
      - {name: gate, configMap: {name: gate, optional: true}}
`

// testInitContainers has containers run in order before a sandbox, with its volumes and network.
func testInitContainers(t *testing.T, s *server) {
	s.mustKubectl("", "create", "secret", "generic", "who", "--from-literal=name=me")
	s.mustKubectl(initManifest, "apply", "-f", "-")
	ready := func(start, text string) {
		t.Helper()
		eventually.NoError(t, start+text, func() error {
			if got := s.condition("prepared", "Ready"); !strings.HasPrefix(got, start) || !strings.Contains(got, text) {
				return fmt.Errorf("Ready is %q", got)
			}
			return nil
		})
	}
	ready("False PodInitializing: init container first runs (1 of 2)", "")
	s.mustKubectl("", "delete", "sandbox", "prepared", patience) // while one runs
	s.mustKubectl("", "create", "configmap", "gate", "--from-literal=open=no")
	s.mustKubectl(initManifest, "apply", "-f", "-")
	ready("False Init:CrashLoopBackOff: ", "init container second: ended with code 3: the gate says no")
	s.mustKubectl("", "patch", "configmap", "gate", "--type=merge", "-p", `{"data":{"open":"yes"}}`)
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/prepared", patience)
	if got := s.mustKubectl("", "exec", "prepared", "-c", "main", "--", "sh", "-c", "cat /work/log; ls /root-file /gate 2>&1; curl -s -o /dev/null --max-time 1 http://127.0.0.1:1; ip -4 addr | grep -c \"inet 10\""); !strings.HasPrefix(got, "first by me in prepared\n1\n0\nmain\nls: ") || !strings.HasSuffix(got, "\n1\n") {
		t.Errorf("the sandbox has %q", got)
	}
	if out, err := s.kubectl("", "logs", "prepared", "-c", "first"); err == nil || !strings.Contains(out, "init container") {
		t.Errorf("logs of an init container: %v %s", err, out)
	}
	s.mustKubectl("", "delete", "sandbox", "prepared", patience)

	s.mustKubectl("", "patch", "configmap", "gate", "--type=merge", "-p", `{"data":{"open":"no"}}`)
	s.mustKubectl(strings.Replace(initManifest, "      initContainers:", "      restartPolicy: Never\n      initContainers:", 1), "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Finished", "sandbox/prepared", patience)
	ready("False Init:Error: ", "init container second: ended with code 3")
	s.mustKubectl("", "delete", "sandbox/prepared", "configmap/gate", "secret/who", patience)
}
