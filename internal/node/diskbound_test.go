package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// ofDisk bounds the disk of a sandbox, and gives it a scratch volume and a claim.
func ofDisk(s *agents.Sandbox) {
	c := &s.Spec.PodTemplate.Spec.Containers[0]
	if c.Resources.Limits == nil {
		c.Resources.Limits = corev1.ResourceList{}
	}
	c.Resources.Limits[corev1.ResourceEphemeralStorage] = resource.MustParse("48Mi")
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "scratch", MountPath: "/scratch"}, corev1.VolumeMount{Name: "data", MountPath: "/data"})
	s.Spec.PodTemplate.Spec.Volumes = append(s.Spec.PodTemplate.Spec.Volumes, corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	claim := agents.PersistentVolumeClaimTemplate{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}
	claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("24Mi")}
	s.Spec.VolumeClaimTemplates = append(s.Spec.VolumeClaimTemplates, claim)
}

// Issue 15: a sandbox of 10 GiB could write 11.
func TestDiskIsBounded(t *testing.T) {
	t.Parallel()
	if _, err := disk.Check(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	m := newMachine(t)
	n, _ := m.node()
	for _, class := range []string{string(oci.GVisor), string(oci.Runc)} {
		t.Run(class, func(t *testing.T) { diskIsBounded(t, n, class) })
	}
}

func diskIsBounded(t *testing.T, n *Node, class string) {
	s, neighbour := object(ofDisk), object(ofDisk)
	s.Spec.PodTemplate.Spec.RuntimeClassName, neighbour.Spec.PodTemplate.Spec.RuntimeClassName = &class, &class
	ensure(t, n, s)
	ensure(t, n, neighbour)
	for dir, most := range map[string]int64{"/root": 48 << 20, "/scratch": 48 << 20, "/data": 24 << 20} {
		out, code := run(t, n, s, "dd if=/dev/zero of="+dir+"/big bs=1M count=64 2>&1; stat -c %s "+dir+"/big; busybox rm "+dir+"/big")
		if code != 0 || !strings.Contains(out, "No space left on device") {
			t.Errorf("%s: exit %d: %s", dir, code, out)
		}
		if got := lastNumber(t, out); got > most+most/10 || got < most*8/10 {
			t.Errorf("%s takes %d bytes, not %d", dir, got, most)
		}
	}
	out, code := run(t, n, s, "busybox seq 1 6000 | busybox sed s,^,/data/f, | busybox xargs busybox touch 2>&1 | busybox tail -n 1; ls /data | busybox wc -l")
	if code != 0 || !strings.Contains(out, "No space left on device") || lastNumber(t, out) > 4100 || lastNumber(t, out) < 4000 {
		t.Errorf("inodes: exit %d: %s", code, out)
	}
	if out, code := run(t, n, neighbour, "dd if=/dev/zero of=/root/big bs=1M count=30 && dd if=/dev/zero of=/data/big bs=1M count=16"); code != 0 {
		t.Errorf("the neighbour: %s", out)
	}
	if out, code := run(t, n, neighbour, "busybox df -m / | busybox tail -n 1 | busybox awk '{print $2}'"); code != 0 || lastNumber(t, out) > 60 {
		t.Errorf("df shows %s MiB", out)
	}
	image := filepath.Join(n.host.Dir(string(n.handles.Lookup(s.UID).ID)), "disk.img")
	if disk.Allocated(image) == 0 {
		t.Fatal("no image of a disk")
	}
	must(t, n.Remove(t.Context(), refOf(s)))
	if _, err := os.Stat(image); !os.IsNotExist(err) {
		t.Errorf("after the removal: %v", err)
	}
}

// lastNumber is the last word of an output that is a number.
func lastNumber(t *testing.T, out string) (n int64) {
	t.Helper()
	q, found := resource.Quantity{}, false
	for word := range strings.FieldsSeq(out) {
		if v, err := resource.ParseQuantity(word); err == nil {
			q, found = v, true
		}
	}
	if !found {
		t.Fatalf("no number in %q", out)
	}
	return q.Value()
}
