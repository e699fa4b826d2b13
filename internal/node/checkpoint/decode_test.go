package checkpoint

import (
	"strings"
	"testing"
)

func TestDecodeCheckpoint(t *testing.T) {
	for value, says := range map[string]string{
		`{"stage":"ready","ref":{"UID":"a"}}`:   "",
		`{"stage":"ready","ref":{"UID":"b"}}`:   "under another key",
		`{"stage":"flying","ref":{"UID":"a"}}`:  "not known",
		`{"stage":"ready","ref":{"UID":"a"},x}`: "decode",
	} {
		_, err := decode([]byte("a"), []byte(value))
		if (err == nil) != (says == "") || (err != nil && !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", value, err, says)
		}
	}
	if _, err := decode([]byte("../a"), []byte(`{"stage":"ready","ref":{"UID":"../a"}}`)); err == nil {
		t.Error("a path was accepted as a UID")
	}
}
