package checkpoint

import (
	"strings"
	"testing"
)

func TestDecodeCheckpoint(t *testing.T) {
	for value, want := range map[string]string{
		`{"stage":"ready","ref":{"UID":"a"}}`:   "",
		`{"stage":"ready","ref":{"UID":"b"}}`:   "under another key",
		`{"stage":"flying","ref":{"UID":"a"}}`:  "unknown stage",
		`{"stage":"ready","ref":{"UID":"a"},x}`: "decode",
	} {
		_, err := decode([]byte("a"), []byte(value))
		if (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", value, err, want)
		}
	}
	if _, err := decode([]byte("../a"), []byte(`{"stage":"ready","ref":{"UID":"../a"}}`)); err == nil {
		t.Error("a path was accepted as a UID")
	}
}
