package plan

import (
	"encoding/json"
	"testing"
)

// Rows of older versions have the images of their containers under these keys, and those of this version too.
func TestImagesInRows(t *testing.T) {
	type row struct {
		Stage string `json:"stage"`
		Images
	}
	const older = `{"stage":"live","digest":"d","imageEnv":["A=1"],"imageRun":{"ref":"r","user":"u"},"sidecars":{"web":{"digest":"e","imageEnv":["B=2"]}}}`
	var r row
	if err := json.Unmarshal([]byte(older), &r); err != nil {
		t.Fatal(err)
	}
	if r.Digest != "d" || r.ImageEnv[0] != "A=1" || r.ImageRun.User != "u" || r.ImageOf("web").Digest != "e" || r.ImageOf("web").ImageRun != nil || r.ImageOf("").Digest != "d" {
		t.Errorf("%+v", r)
	}
	if b, err := json.Marshal(r); err != nil || string(b) != older {
		t.Errorf("it is written as %s, %v", b, err)
	}
	for digest, want := range map[string]bool{"d": true, "e": true, "f": false} {
		if r.Uses(digest) != want {
			t.Errorf("%s is used: %t", digest, !want)
		}
	}
}
