package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/s3"
)

var (
	// makeVolume makes a volume and writes a file to it.
	makeVolume = operation{
		name: "volume", storeAfter: neverOnDisk, prepare: newSubjectOf("volume"), do: volumeOf,
		check: checkVolume, cleanup: func(w *fixture, s *subject) {
			w.need(endVolume(w.t.Context(), w, s))
			checkNoVolume(w, s)
		},
	}
	dropVolume = operation{
		name: "end of a volume", storeAfter: neverOnDisk, prepare: withVolume, do: endVolume, check: checkNoVolume, cleanup: nothingLeft,
	}
	// makeBucket has the REST API make a volume in a bucket, and writes a file to it.
	makeBucket = operation{
		name: "volume in a bucket", storeAfter: neverOnDisk, prepare: newSubjectOf("bucket"), do: bucketOf, check: checkBucket,
		cleanup: func(w *fixture, s *subject) {
			w.need(endVolume(w.t.Context(), w, s))
			checkNoBucket(w, s)
		},
	}
	dropBucket = operation{
		name: "end of a volume in a bucket", storeAfter: neverOnDisk, do: endVolume, check: checkNoBucket, cleanup: nothingLeft,
		prepare: func(w *fixture) *subject {
			s := newSubject("bucket")
			w.need(bucketOf(w.t.Context(), w, s))
			return s
		},
	}
	mountVolume = operation{
		name: "create with a volume", storeAfter: neverOnDisk, prepare: withVolume,
		do: func(ctx context.Context, w *fixture, s *subject) error {
			var made struct{ SandboxID string }
			_, err := w.send(ctx, http.MethodPost, "/v2/sandboxes", s.name, map[string]any{
				"templateID": "cold", "timeout": 3600, "volumeMounts": []map[string]string{{"name": s.name, "path": "/mnt/v"}},
			}, &made)
			if err == nil {
				s.id = made.SandboxID
			}
			return err
		},
		check: func(w *fixture, s *subject) {
			w.meet(s.id)
			if got := w.exec(s.id, "cat /mnt/v/file"); got != s.name {
				w.t.Errorf("the volume of %s has %q", s.id, got)
			}
			checkVolume(w, s)
		},
		cleanup: func(w *fixture, s *subject) {
			killSubject(w, s)
			w.need(endVolume(w.t.Context(), w, s))
			checkNoVolume(w, s)
		},
	}
)

func withVolume(w *fixture) *subject {
	s := newSubject("volume")
	w.need(volumeOf(w.t.Context(), w, s))
	return s
}

func volumeObject(s *subject) *barchan.Volume {
	return &barchan.Volume{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}}
}

// content makes one request for a volume's file.
func (w *fixture) content(ctx context.Context, v *barchan.Volume, method, body string) (string, error) {
	var info struct{ Token string }
	if _, err := w.send(ctx, http.MethodGet, "/volumes/"+sandbox.VolumeIDOf(v.UID), "", nil, &info); err != nil {
		return "", err
	}
	target := "http://" + w.http + "/volumecontent/" + sandbox.VolumeIDOf(v.UID) + "/file?" + url.Values{"path": {"/file"}, "force": {"true"}}.Encode()
	req, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+info.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s", resp.Status, b)
	}
	return string(b), err
}

// volumeOf makes a volume, once, and writes its file.
func volumeOf(ctx context.Context, w *fixture, s *subject) error {
	v := volumeObject(s)
	if err := w.objects.Create(ctx, v); client.IgnoreAlreadyExists(err) != nil {
		return err
	}
	for {
		if err := w.objects.Get(ctx, client.ObjectKeyFromObject(v), v); err != nil {
			return err
		}
		if v.Status.Phase == barchan.VolumeReady && v.Status.Used != nil {
			_, err := w.content(ctx, v, http.MethodPut, s.name)
			return err
		}
		if err := shortPause(ctx); err != nil {
			return fmt.Errorf("%w: %+v", err, v.Status)
		}
	}
}

// bucketOf makes a volume in a bucket. A request that was cut short is repeated; once it has made the volume whole, that is known by its name.
func bucketOf(ctx context.Context, w *fixture, s *subject) error {
	_, err := w.send(ctx, http.MethodPost, "/volumes", "", map[string]any{"name": s.name, "s3": map[string]string{
		"endpoint": w.buckets.URL(), "bucket": "crash", "prefix": s.name, "accessKeyID": s3.AccessKeyID, "secretAccessKey": s3.SecretAccessKey,
	}}, nil)
	if err != nil && !strings.Contains(err.Error(), "already exists") {
		return err
	}
	v := volumeObject(s)
	for {
		if err := w.objects.Get(ctx, client.ObjectKeyFromObject(v), v); err != nil {
			return err
		}
		if v.Status.Phase == barchan.VolumeReady {
			_, err := w.content(ctx, v, http.MethodPut, s.name)
			return err
		}
		if err := shortPause(ctx); err != nil {
			return fmt.Errorf("%w: %+v", err, v.Status)
		}
	}
}

func checkBucket(w *fixture, s *subject) {
	w.t.Helper()
	v := volumeObject(s)
	w.need(w.objects.Get(w.t.Context(), client.ObjectKeyFromObject(v), v))
	if got, err := w.content(w.t.Context(), v, http.MethodGet, ""); err != nil || got != s.name {
		w.t.Errorf("the volume's file has %q: %v", got, err)
	}
	if got := w.buckets.Object(w.t, "crash", s.name+"/file"); string(got) != s.name {
		w.t.Errorf("the bucket has %q", got)
	}
}

// checkNoBucket requires that neither the volume, its mount nor its key is left.
func checkNoBucket(w *fixture, s *subject) {
	w.t.Helper()
	checkNoVolume(w, s)
	key := client.ObjectKey{Namespace: "default", Name: barchan.VolumeSecretName(s.name)}
	if err := w.objects.Get(w.t.Context(), key, &corev1.Secret{}); !apierrors.IsNotFound(err) {
		w.t.Errorf("the key of a volume that is gone: %v", err)
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), w.volumesDir()) {
		w.t.Errorf("still mounted: %v", err)
	}
}

func shortPause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(20 * time.Millisecond):
		return nil
	}
}

// endVolume deletes a volume, and waits until it is gone.
func endVolume(ctx context.Context, w *fixture, s *subject) error {
	v := volumeObject(s)
	if err := w.objects.Delete(ctx, v); client.IgnoreNotFound(err) != nil {
		return err
	}
	for {
		err := w.objects.Get(ctx, client.ObjectKeyFromObject(v), v)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil {
			err = shortPause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%w: %+v", err, v.Status)
		}
	}
}

func (w *fixture) volumesDir() string {
	return filepath.Join(w.value("BARCHAN_DATA_DIR"), "node", "volumes")
}

func checkVolume(w *fixture, s *subject) {
	w.t.Helper()
	v := volumeObject(s)
	w.need(w.objects.Get(w.t.Context(), client.ObjectKeyFromObject(v), v))
	if got, err := w.content(w.t.Context(), v, http.MethodGet, ""); err != nil || got != s.name {
		w.t.Errorf("the volume's file has %q: %v", got, err)
	}
	home := filepath.Join(w.volumesDir(), "default", s.name)
	if on := filepath.Join(home, "disk"); exists(on) {
		home = on
	}
	uploads, err := os.ReadDir(filepath.Join(home, "uploads"))
	if err != nil || len(uploads) > 0 {
		w.t.Errorf("uploads that are left: %v, %v", uploads, err)
	}
}

func checkNoVolume(w *fixture, _ *subject) {
	w.t.Helper()
	left, err := os.ReadDir(w.volumesDir())
	if err != nil || len(left) > 0 {
		w.t.Errorf("directories that are left: %v, %v", left, err)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
