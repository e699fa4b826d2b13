package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/nfs"
	"github.com/barchan-dev/barchan/internal/testkit/s3"
)

// TestVolumes is what the unmodified SDK, the command line and kubectl do with volumes, before and after a restart of the server.
func TestVolumes(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: a whole server needs root")
	}
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", "100ms")
	buckets := s3.Start(t, "models")
	export := nfs.Start(t)
	s.set("BARCHAN_VOLUME_ENDPOINTS", buckets.Address+","+export.Address)
	s.start()
	s.must("image", "build", "base")
	t.Run("a bucket", func(t *testing.T) { testVolumeBucket(t, s.in(t), buckets) })
	t.Run("an export", func(t *testing.T) { testVolumeExport(t, s.in(t), export) })
	t.Run("the unmodified SDK", func(t *testing.T) { testVolumeSDK(t, s.in(t)) })
	t.Run("the command line", func(t *testing.T) { testVolumeCommands(t, s.in(t)) })
	t.Run("kubectl", func(t *testing.T) { testVolumeObjects(t, s.in(t)) })
	t.Run("a quota", func(t *testing.T) { testVolumeQuota(t, s.in(t)) })
	var left []struct{ Name string }
	if s.read(&left, "volume", "ls"); len(left) > 0 {
		t.Errorf("volumes are left: %v", left)
	}
	dirs, err := os.ReadDir(filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "volumes"))
	if err != nil || len(dirs) > 0 {
		t.Errorf("directories are left: %v, %v", dirs, err)
	}
}

// testVolumeSDK leaves a volume and its sandbox to a server that is killed, and finds them after its restart.
func testVolumeSDK(t *testing.T, s *server) {
	runSDK(t, "volumes.test.mjs", s.clientEnv())
	var list []struct{ SandboxID string }
	if s.read(&list, "ls"); len(list) != 1 {
		t.Fatalf("sandboxes: %v", list)
	}
	s.stop(syscall.SIGKILL)
	s.start()
	runSDK(t, "volumes.test.mjs", append(s.clientEnv(), "PART=after", "SANDBOX="+list[0].SandboxID))
}

func testVolumeCommands(t *testing.T, s *server) {
	s.must("volume", "create", "cli", "--capacity", "1Gi")
	dir := t.TempDir()
	for name, text := range map[string]string{"tree/a": "first", "tree/sub/b": "second"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	s.must("volume", "cp", filepath.Join(dir, "tree"), "cli:/in")
	out := s.must("run", "--volume", "cli:/mnt/v", "--", "sh", "-c", "cat /mnt/v/in/a /mnt/v/in/sub/b && stat -c %a /mnt/v/in/a && echo out > /mnt/v/out")
	if out != "firstsecond640\n" {
		t.Errorf("in a sandbox: %q", out)
	}
	if out := s.data("volume", "cp", "cli:/out", "-"); out != "out\n" {
		t.Errorf("volume cp to standard output: %q", out)
	}
	s.must("volume", "cp", "cli:/", filepath.Join(dir, "all"))
	if b, err := os.ReadFile(filepath.Join(dir, "all/in/sub/b")); string(b) != "second" {
		t.Errorf("copied out: %q, %v", b, err)
	}
	if out := s.data("volume", "ls"); !strings.Contains(out, "cli") || !strings.Contains(out, "1.0") {
		t.Errorf("volume ls:\n%s", out)
	}
	if out := s.data("volume", "show", "cli"); !strings.Contains(out, "Capacity") || strings.Contains(out, "bvt_") {
		t.Errorf("volume show:\n%s", out)
	}
	for _, bad := range [][]string{{"volume", "cp", "a", "b"}, {"run", "--volume", "cli", "--", "true"}, {"volume", "create", "x", "--capacity", "none"}} {
		if out, err := s.try(bad...); exitCode(err) != 2 {
			t.Errorf("%v = %v\n%s", bad, err, out)
		}
	}
	if out, err := s.try("volume", "cp", "none:/x", "-"); exitCode(err) != 1 || !strings.Contains(out, "not found") {
		t.Errorf("cp of no volume = %v\n%s", err, out)
	}
	s.must("volume", "rm", "cli")
}

const volumeManifest = `
apiVersion: barchan.dev/v1alpha1
kind: Volume
metadata: {name: objects}
spec: {capacity: 64Mi}
---
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: %[1]s}
spec:
  podTemplate:
    spec:
      runtimeClassName: %[2]s
      volumes: [{name: v, persistentVolumeClaim: {claimName: objects}}]
      containers: [{name: main, image: ` + baseImage + `, volumeMounts: [{name: v, mountPath: /v}]}]
`

// testVolumeObjects has sandboxes of both classes share a volume.
func testVolumeObjects(t *testing.T, s *server) {
	classes := []string{"gvisor", "runc"}
	for _, class := range classes {
		s.apply(fmt.Sprintf(volumeManifest, "on-"+class, class))
	}
	for _, class := range classes {
		s.mustKubectl("", "wait", "sandbox/on-"+class, "--for=condition=Ready", "--timeout=60s")
	}
	s.exec("on-runc", "echo runc > /v/f")
	if out := s.exec("on-gvisor", "cat /v/f; echo gvisor >> /v/f"); out != "runc" {
		t.Errorf("gVisor reads %q", out)
	}
	if out := s.exec("on-runc", "tail -1 /v/f"); out != "gvisor" {
		t.Errorf("runc reads %q", out)
	}
	s.mustKubectl("", "wait", "volume/objects", "--for=jsonpath={.status.sandboxes}=2", "--timeout=60s")
	if out := s.mustKubectl("", "get", "volume", "objects"); !strings.Contains(out, "Ready") || !strings.Contains(out, "64Mi") {
		t.Errorf("kubectl get:\n%s", out)
	}
	volume, sandbox, _ := strings.Cut(fmt.Sprintf(volumeManifest, "early", "gvisor"), "---")
	for manifest, field := range map[string]string{
		strings.Replace(sandbox, "mountPath: /v", "mountPath: /v, subPath: x", 1):             "volumeMounts[0].subPath",
		strings.Replace(volume, "capacity: 64Mi", "capacity: 64Mi, storageClassName: nfs", 1): "spec.nfs",
		strings.Replace(volume, "capacity: 64Mi", "capacity: 64Mi, storageClassName: s3", 1):  "spec.s3",
		strings.Replace(volume, "capacity: 64Mi", "readOnly: true", 1):                        "spec.readOnly",
		strings.Replace(volume, "capacity: 64Mi", "capacity: 1Ki", 1):                         "spec.capacity",
		strings.Replace(volume, "capacity: 64Mi", "displayName: other", 1):                    "spec.displayName",
		strings.Replace(sandbox, "claimName: objects", "claimName: ../objects", 1):            "claimName",
		strings.Replace(volume, "name: objects", "name: a.b", 1):                              "metadata.name",
	} {
		if out, err := s.kubectl(manifest, "apply", "-f", "-"); err == nil || !strings.Contains(out, field) {
			t.Errorf("not refused by %s: %v\n%s", field, err, out)
		}
	}
	s.mustKubectl("", "delete", "volume", "objects", "--wait=false")
	eventually.True(t, "it names its sandboxes", func() bool {
		out := s.mustKubectl("", "describe", "volume", "objects")
		return strings.Contains(out, "on-gvisor") && strings.Contains(out, "on-runc") && strings.Contains(out, "Terminating")
	})
	if out := s.exec("on-runc", "tail -1 /v/f"); out != "gvisor" {
		t.Errorf("after the deletion: %q", out)
	}
	s.mustKubectl("", "delete", "sandbox", "on-runc", "on-gvisor")
	s.mustKubectl("", "wait", "volume/objects", "--for=delete", "--timeout=60s")
	// A sandbox waits for its volume, as a Pod does for its claim.
	s.apply(sandbox)
	eventually.True(t, "it says what it waits for", func() bool {
		return strings.Contains(s.mustKubectl("", "describe", "sandbox", "early"), `volume "objects" does not exist`)
	})
	s.apply(volume)
	s.mustKubectl("", "wait", "sandbox/early", "--for=condition=Ready", "--timeout=60s")
	s.mustKubectl("", "delete", "sandbox/early", "volume/objects")
}

func testVolumeQuota(t *testing.T, s *server) {
	s.mustKubectl("", "annotate", "namespace", "default", "barchan.dev/quota-volumes=2", "barchan.dev/quota-volume-capacity=3Gi")
	defer s.mustKubectl("", "annotate", "namespace", "default", "barchan.dev/quota-volumes-", "barchan.dev/quota-volume-capacity-")
	s.must("volume", "create", "one", "--capacity", "1Gi")
	if out, err := s.try("volume", "create", "large", "--capacity", "2500Mi"); err == nil || !strings.Contains(out, "3Gi") {
		t.Errorf("beyond the capacity: %v\n%s", err, out)
	}
	s.must("volume", "create", "two", "--capacity", "1Gi")
	if out, err := s.try("volume", "create", "three", "--capacity", "1Mi"); err == nil || !strings.Contains(out, "quota of 2 volumes") {
		t.Errorf("beyond the number: %v\n%s", err, out)
	}
	s.mustKubectl("", "patch", "volume", "two", "--type=merge", "-p", `{"spec":{"capacity":"9Gi"}}`)
	s.mustKubectl("", "wait", "volume/two", "--for=jsonpath={.status.conditions[0].reason}=QuotaExceeded", "--timeout=60s")
	s.must("volume", "rm", "one", "two")
}
