package signedurl

import (
	"strings"
	"testing"
	"time"
)

func TestUpload(t *testing.T) {
	key, hash := []byte("key"), strings.Repeat("a", 64)
	good := Upload(key, "team", hash, time.Now().Add(time.Minute))
	if namespace, got, ok := VerifyUpload(key, good); !ok || namespace != "team" || got != hash {
		t.Errorf("%s = %s, %s, %v", good, namespace, got, ok)
	}
	late := Upload(key, "team", hash, time.Now().Add(time.Hour))
	parts := strings.Split(good, "/")
	for name, path := range map[string]string{
		"expired":         Upload(key, "team", hash, time.Now().Add(-time.Second)),
		"other key":       Upload([]byte("other"), "team", hash, time.Now().Add(time.Minute)),
		"other namespace": strings.Replace(good, "team", "tean", 1),
		"other hash":      strings.Replace(good, "/a", "/b", 1),
		"later":           strings.Join([]string{parts[0], parts[1], strings.Split(late, "/")[2], parts[3]}, "/"),
		"cut":             strings.Join(parts[:3], "/"),
		"longer":          good + "/",
		"empty":           "",
		"of a port":       "team/" + hash + "/" + parts[2] + "/" + signPort("key", 80, parts[2]),
	} {
		if _, _, ok := VerifyUpload(key, path); ok {
			t.Errorf("%s: %s is accepted", name, path)
		}
	}
}
