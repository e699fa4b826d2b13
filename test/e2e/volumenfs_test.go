package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/nfs"
)

const exportSandbox = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: export-%[1]s}
spec:
  podTemplate:
    spec:
      runtimeClassName: %[1]s
      volumes: [{name: v, persistentVolumeClaim: {claimName: home}}]
      containers: [{name: main, image: ` + baseImage + `, volumeMounts: [{name: v, mountPath: /v}]}]
---
`

// testVolumeExport has sandboxes of both classes, the API and another client share the export of an NFS server, which hangs meanwhile.
func testVolumeExport(t *testing.T, s *server, export *nfs.Server) {
	port := strconv.Itoa(export.Port(t))
	create := func(name, path string, more ...string) (string, error) {
		return s.try(append([]string{"volume", "create", name, "--nfs", "127.0.0.1:" + path, "--mount-option", "port=" + port + ",mountport=" + port}, more...)...)
	}
	if out, err := create("refused", nfs.Denied); exitCode(err) != 1 || !strings.Contains(out, "AccessDenied") {
		t.Errorf("an export that is denied: %v\n%s", err, out)
	}
	if out, err := s.try("volume", "create", "refused", "--nfs", "127.0.0.1:/export"); exitCode(err) != 1 || !strings.Contains(out, "EndpointRefused") {
		t.Errorf("a server that is not allowed: %v\n%s", err, out)
	}
	if out, err := create("refused", nfs.Export, "--mount-option", "hard"); exitCode(err) != 1 || !strings.Contains(out, "spec.nfs.mountOptions") {
		t.Errorf("an option that is not allowed: %v\n%s", err, out)
	}
	for name, more := range map[string][]string{"home": nil, "fixed": {"--read-only"}} {
		if out, err := create(name, nfs.Export, more...); err != nil {
			t.Fatalf("create: %v\n%s", err, out)
		}
	}
	if err := os.WriteFile(filepath.Join(export.Dir, "there"), []byte("before\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.apply(fmt.Sprintf(exportSandbox, "gvisor") + fmt.Sprintf(exportSandbox, "runc"))
	for _, class := range []string{"gvisor", "runc"} {
		s.mustKubectl("", "wait", "sandbox/export-"+class, "--for=condition=Ready", "--timeout=60s")
	}
	if out := s.exec("export-gvisor", "cat /v/there && mkdir /v/d && echo one > /v/d/f && mv /v/d/f /v/d/g && echo two >> /v/d/g && ln -s g /v/d/l && cat /v/d/l"); out != "before\none\ntwo" {
		t.Errorf("gVisor: %q", out)
	}
	if text, err := os.ReadFile(filepath.Join(export.Dir, "d/g")); err != nil || string(text) != "one\ntwo\n" {
		t.Errorf("on the server: %q, %v", text, err)
	}
	if out := s.exec("export-runc", "echo three >> /v/d/g && cat /v/d/g"); out != "one\ntwo\nthree" {
		t.Errorf("runc: %q", out)
	}
	s.must("volume", "cp", os.Args[0], "home:/big")
	if a, b := fileSize(t, os.Args[0]), fileSize(t, filepath.Join(export.Dir, "big")); a != b {
		t.Errorf("an upload of %d bytes has %d on the server", a, b)
	}
	if out, err := s.try("run", "--volume", "fixed:/v", "--", "sh", "-c", "cat /v/there && echo x > /v/there"); err == nil || !strings.Contains(out, "before") || !strings.Contains(out, "Read-only") {
		t.Errorf("a volume that is read-only: %v\n%s", err, out)
	}
	export.Signal(t, unix.SIGSTOP)
	eventually.True(t, "a silent server is an error", func() bool {
		return strings.Contains(s.exec("export-gvisor", "cat /v/other 2>&1; true"), "Input/output error")
	})
	s.mustKubectl("", "wait", "volume/home", "--for=jsonpath={.status.conditions[0].reason}=EndpointUnreachable", "--timeout=60s")
	s.must("run", "--", "true")
	s.mustKubectl("", "delete", "sandbox/export-gvisor", "--timeout=60s") // although its server hangs
	export.Signal(t, unix.SIGCONT)
	s.mustKubectl("", "wait", "volume/home", "--for=jsonpath={.status.conditions[0].reason}=Available", "--timeout=60s")
	s.exec("export-runc", "echo back > /v/back")
	s.mustKubectl("", "delete", "sandbox/export-runc", "--timeout=60s")
	s.must("volume", "rm", "home", "fixed")
	eventually.True(t, "nothing is mounted", func() bool {
		mounts, err := os.ReadFile("/proc/self/mounts")
		return err == nil && !strings.Contains(string(mounts), s.value("BARCHAN_DATA_DIR")+"/node/volumes")
	})
	if text, err := os.ReadFile(filepath.Join(export.Dir, "back")); err != nil || string(text) != "back\n" {
		t.Errorf("after the volume's deletion the server has %q: %v", text, err)
	}
}

func fileSize(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}
