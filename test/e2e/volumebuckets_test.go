package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/s3"
)

const bucketManifest = `
apiVersion: v1
kind: Secret
metadata: {name: bucket-key}
stringData: {accessKeyID: ` + s3.AccessKeyID + `, secretAccessKey: %[3]s}
---
apiVersion: barchan.dev/v1alpha1
kind: Volume
metadata: {name: %[1]s}
spec: {storageClassName: s3, readOnly: %[5]t, s3: {endpoint: "%[2]s", bucket: %[4]s, prefix: in, secretName: bucket-key}}
---
`

const bucketSandbox = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: bucket-%[1]s}
spec:
  podTemplate:
    spec:
      runtimeClassName: %[1]s
      volumes: [{name: v, persistentVolumeClaim: {claimName: models}}]
      containers: [{name: main, image: ` + baseImage + `, volumeMounts: [{name: v, mountPath: /v}]}]
---
`

// testVolumeBucket has sandboxes of both classes, the API, and another client of the object store share a bucket. It kills the server and the
// object store meanwhile.
func testVolumeBucket(t *testing.T, s *server, buckets *s3.Server) {
	buckets.Put(t, "models", "in/weights", "w1")
	volume := func(name, key, bucket string, readOnly bool) string {
		return fmt.Sprintf(bucketManifest, name, buckets.URL(), key, bucket, readOnly)
	}
	s.apply(volume("models", "wrong", "models", false) + fmt.Sprintf(bucketSandbox, "gvisor") + fmt.Sprintf(bucketSandbox, "runc"))
	reason := func(name, reason string) {
		t.Helper()
		s.mustKubectl("", "wait", "volume/"+name, "--for=jsonpath={.status.conditions[0].reason}="+reason, "--timeout=60s")
	}
	reason("models", "AccessDenied")
	s.apply(volume("models", s3.SecretAccessKey, "models", false) + volume("missing", s3.SecretAccessKey, "missing", false) + volume("fixed", s3.SecretAccessKey, "models", true))
	reason("missing", "BucketNotFound")
	for _, class := range []string{"gvisor", "runc"} {
		s.mustKubectl("", "wait", "sandbox/bucket-"+class, "--for=condition=Ready", "--timeout=60s")
	}
	if out := s.exec("bucket-gvisor", "cat /v/weights && mkdir /v/d && echo one > /v/d/f && mv /v/d/f /v/d/g && echo two >> /v/d/g"); out != "w1" {
		t.Errorf("gVisor reads %q", out)
	}
	if out := s.exec("bucket-runc", "cat /v/d/g"); out != "one\ntwo" {
		t.Errorf("runc reads %q", out)
	}
	inBucket := func(key, text string) {
		t.Helper()
		eventually.True(t, key+" is in the bucket", func() bool { return string(buckets.Object(t, "models", "in/"+key)) == text })
	}
	inBucket("d/g", "one\ntwo\n")
	testBucketSecrets(t, s)
	s.must("volume", "cp", os.Args[0], "models:/big")
	if b := buckets.Object(t, "models", "in/big"); len(b) < 1<<20 {
		t.Errorf("an upload of the API: %d bytes are in the bucket when it returns", len(b))
	}
	if out := s.data("volume", "cp", "models:/d/g", "-"); out != "one\ntwo\n" {
		t.Errorf("the API reads %q", out)
	}
	s.exec("bucket-gvisor", "nohup sh -c 'sleep 3; echo three >> /v/d/g' > /dev/null 2>&1 &")
	s.stop(syscall.SIGKILL)
	inBucket("d/g", "one\ntwo\nthree\n")
	s.start()
	reason("fixed", "Available")
	if out, err := s.try("run", "--volume", "fixed:/v", "--", "sh", "-c", "cat /v/weights && echo x > /v/weights"); err == nil || !strings.Contains(out, "w1") || !strings.Contains(out, "Read-only") {
		t.Errorf("a volume that is read-only: %v\n%s", err, out)
	}
	testBucketCommands(t, s, buckets)
	buckets.Signal(t, unix.SIGSTOP)
	eventually.True(t, "a silent object store is an error, once what is known of the directory is too old", func() bool {
		return strings.Contains(s.exec("bucket-gvisor", "cat /v/other 2>&1; true"), "Input/output error")
	})
	reason("models", "EndpointUnreachable")
	s.must("run", "--", "true")
	buckets.Signal(t, unix.SIGCONT)
	reason("models", "Available")
	s.exec("bucket-gvisor", "echo back > /v/back")
	inBucket("back", "back\n")
	s.mustKubectl("", "delete", "sandbox/bucket-gvisor", "sandbox/bucket-runc", "volume/models", "volume/missing", "volume/fixed", "--timeout=90s")
	if b := buckets.Object(t, "models", "in/weights"); string(b) != "w1" {
		t.Errorf("after the volume's deletion the bucket has %q", b)
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), s.value("BARCHAN_DATA_DIR")+"/node/volumes") {
		t.Errorf("still mounted: %v", err)
	}
}

// testBucketSecrets looks for the key where sandboxes could find it.
func testBucketSecrets(t *testing.T, s *server) {
	t.Helper()
	if out := s.exec("bucket-runc", "env; cat /proc/mounts; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; ls -a /v"); strings.Contains(out, s3.SecretAccessKey) || strings.Contains(out, s3.AccessKeyID) {
		t.Errorf("the sandbox sees the key:\n%s", out)
	}
}

// testBucketCommands has the command line make volumes in buckets: its key is in a Secret that goes with the volume, and one that does not work makes nothing.
func testBucketCommands(t *testing.T, s *server, buckets *s3.Server) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	create := func(key, name, path string, more ...string) (string, error) {
		if err := os.WriteFile(secret, []byte(key+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return s.try(append([]string{"volume", "create", name, "--s3", buckets.URL() + path, "--access-key-id", s3.AccessKeyID, "--secret-file", secret}, more...)...)
	}
	for path, want := range map[string]string{"/missing": "BucketNotFound", "/models": "AccessDenied"} {
		key := s3.SecretAccessKey
		if path == "/models" {
			key = "wrong"
		}
		if out, err := create(key, "cli-refused", path); exitCode(err) != 1 || !strings.Contains(out, want) {
			t.Errorf("a volume of %s: %v\n%s", path, err, out)
		}
	}
	eventually.True(t, "what was refused is gone", func() bool {
		return !strings.Contains(s.mustKubectl("", "get", "volumes,secrets", "-o", "name"), "cli-refused")
	})
	if out, err := create(s3.SecretAccessKey, "cli-bucket", "/models/in", "--read-only"); err != nil {
		t.Fatalf("create: %v\n%s", err, out)
	}
	if out := s.must("run", "--volume", "cli-bucket:/v", "--", "cat", "/v/weights"); out != "w1" {
		t.Errorf("a sandbox reads %q", out)
	}
	show := s.data("volume", "show", "cli-bucket")
	for _, want := range []string{"s3", buckets.URL() + "/models/in", "read-only", "Ready"} {
		if !strings.Contains(show, want) {
			t.Errorf("volume show has no %q:\n%s", want, show)
		}
	}
	if out := s.data("volume", "ls"); !strings.Contains(out, "BucketNotFound") || !strings.Contains(out, "local") && !strings.Contains(out, "s3") {
		t.Errorf("volume ls:\n%s", out)
	}
	if all := show + s.must("volume", "ls", "--json"); strings.Contains(all, s3.SecretAccessKey) {
		t.Errorf("the secret is shown:\n%s", all)
	}
	s.must("volume", "rm", "cli-bucket")
	eventually.True(t, "the Secret is gone with its volume", func() bool {
		return !strings.Contains(s.mustKubectl("", "get", "volumes,secrets", "-o", "name"), "cli-bucket")
	})
}
