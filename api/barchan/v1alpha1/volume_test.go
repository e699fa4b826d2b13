package v1alpha1_test

import (
	"strings"
	"testing"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// A volume in a bucket names it whole; what is wrong is named by its field.
func TestVolumesInBuckets(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*barchan.VolumeSpec)
		field  string
	}{
		"whole":           {func(*barchan.VolumeSpec) {}, ""},
		"no prefix":       {func(s *barchan.VolumeSpec) { s.S3.Prefix = "" }, ""},
		"slash at end":    {func(s *barchan.VolumeSpec) { s.S3.Prefix = "a/b/" }, ""},
		"IPv6":            {func(s *barchan.VolumeSpec) { s.S3.Endpoint = "http://[2001:4860::1]:9000" }, ""},
		"no bucket":       {func(s *barchan.VolumeSpec) { s.S3 = nil }, "spec.s3"},
		"local":           {func(s *barchan.VolumeSpec) { s.StorageClassName = barchan.StorageLocal }, "spec.s3"},
		"scheme":          {func(s *barchan.VolumeSpec) { s.S3.Endpoint = "file:///etc" }, "spec.s3.endpoint"},
		"path":            {func(s *barchan.VolumeSpec) { s.S3.Endpoint = "https://a.example/x" }, "spec.s3.endpoint"},
		"user":            {func(s *barchan.VolumeSpec) { s.S3.Endpoint = "https://u:p@a.example" }, "spec.s3.endpoint"},
		"query":           {func(s *barchan.VolumeSpec) { s.S3.Endpoint = "https://a.example?x" }, "spec.s3.endpoint"},
		"bucket":          {func(s *barchan.VolumeSpec) { s.S3.Bucket = "a/b" }, "spec.s3.bucket"},
		"up":              {func(s *barchan.VolumeSpec) { s.S3.Prefix = "../other" }, "spec.s3.prefix"},
		"in the middle":   {func(s *barchan.VolumeSpec) { s.S3.Prefix = "a/../../b" }, "spec.s3.prefix"},
		"absolute":        {func(s *barchan.VolumeSpec) { s.S3.Prefix = "/a" }, "spec.s3.prefix"},
		"long":            {func(s *barchan.VolumeSpec) { s.S3.Prefix = strings.Repeat("a", 513) }, "spec.s3.prefix"},
		"region":          {func(s *barchan.VolumeSpec) { s.S3.Region = "EU west" }, "spec.s3.region"},
		"Secret":          {func(s *barchan.VolumeSpec) { s.S3.SecretName = "a/b" }, "spec.s3.secretName"},
		"local read-only": {func(s *barchan.VolumeSpec) { s.S3, s.StorageClassName, s.ReadOnly = nil, "", true }, "spec.readOnly"},
	} {
		t.Run(name, func(t *testing.T) {
			v := &barchan.Volume{}
			v.Name = "v"
			v.Spec = barchan.VolumeSpec{StorageClassName: barchan.StorageS3, S3: &barchan.S3VolumeSource{
				Endpoint: "https://a.example", Bucket: "models", Prefix: "a/b", SecretName: "key",
			}}
			c.change(&v.Spec)
			barchan.SetVolumeDefaults(v)
			problems := barchan.ValidateVolume(v, nil)
			if c.field == "" && len(problems) > 0 || c.field != "" && (len(problems) != 1 || problems[0].Field != c.field) {
				t.Errorf("problems %v, want one of %q", problems, c.field)
			}
		})
	}
	old := &barchan.Volume{Spec: barchan.VolumeSpec{StorageClassName: barchan.StorageS3, S3: &barchan.S3VolumeSource{
		Endpoint: "https://a.example", Bucket: "models", SecretName: "key",
	}}}
	old.Name = "v"
	barchan.SetVolumeDefaults(old)
	now := old.DeepCopy()
	now.Spec.S3.Bucket = "other"
	if problems := barchan.ValidateVolume(now, old); len(problems) != 1 || problems[0].Field != "spec.s3" {
		t.Errorf("another bucket: %v", problems)
	}
}
