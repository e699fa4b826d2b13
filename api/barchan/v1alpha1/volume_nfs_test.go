package v1alpha1_test

import (
	"strings"
	"testing"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// A volume of an NFS server names its export; what is wrong is named by its field.
func TestVolumesOfNFS(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*barchan.VolumeSpec)
		field  string
	}{
		"whole":         {func(*barchan.VolumeSpec) {}, ""},
		"read-only":     {func(s *barchan.VolumeSpec) { s.ReadOnly = true }, ""},
		"root":          {func(s *barchan.VolumeSpec) { s.NFS.Path = "/" }, ""},
		"IPv6":          {func(s *barchan.VolumeSpec) { s.NFS.Server = "2001:4860::1" }, ""},
		"no export":     {func(s *barchan.VolumeSpec) { s.NFS = nil }, "spec.nfs"},
		"local":         {func(s *barchan.VolumeSpec) { s.StorageClassName = barchan.StorageLocal }, "spec.nfs"},
		"server":        {func(s *barchan.VolumeSpec) { s.NFS.Server = "a/b" }, "spec.nfs.server"},
		"relative":      {func(s *barchan.VolumeSpec) { s.NFS.Path = "a" }, "spec.nfs.path"},
		"up":            {func(s *barchan.VolumeSpec) { s.NFS.Path = "/a/../b" }, "spec.nfs.path"},
		"long":          {func(s *barchan.VolumeSpec) { s.NFS.Path = "/" + strings.Repeat("a", 1024) }, "spec.nfs.path"},
		"version":       {func(s *barchan.VolumeSpec) { s.NFS.MountOptions = []string{"vers=4"} }, "spec.nfs.mountOptions"},
		"hard":          {func(s *barchan.VolumeSpec) { s.NFS.MountOptions = []string{"hard"} }, "spec.nfs.mountOptions"},
		"suid":          {func(s *barchan.VolumeSpec) { s.NFS.MountOptions = []string{"suid"} }, "spec.nfs.mountOptions"},
		"several":       {func(s *barchan.VolumeSpec) { s.NFS.MountOptions = []string{"soft,dev"} }, "spec.nfs.mountOptions"},
		"port":          {func(s *barchan.VolumeSpec) { s.NFS.MountOptions = []string{"port=65536"} }, "spec.nfs.mountOptions"},
		"many":          {func(s *barchan.VolumeSpec) { s.NFS.MountOptions = make([]string, 17) }, "spec.nfs.mountOptions"},
		"with a bucket": {func(s *barchan.VolumeSpec) { s.S3 = &barchan.S3VolumeSource{} }, "spec.s3"},
	} {
		t.Run(name, func(t *testing.T) {
			v := &barchan.Volume{}
			v.Name = "v"
			v.Spec = barchan.VolumeSpec{StorageClassName: barchan.StorageNFS, NFS: &barchan.NFSVolumeSource{
				Server: "nfs.example", Path: "/srv/data", MountOptions: []string{"nfsvers=3", "soft", "port=2050", "mountport=20048"},
			}}
			c.change(&v.Spec)
			barchan.SetVolumeDefaults(v)
			problems := barchan.ValidateVolume(v, nil)
			if c.field == "" && len(problems) > 0 || c.field != "" && (len(problems) != 1 || problems[0].Field != c.field) {
				t.Errorf("problems %v, want one of %q", problems, c.field)
			}
		})
	}
}
