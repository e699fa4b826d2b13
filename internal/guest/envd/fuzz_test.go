package envd

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"testing"
	"unicode/utf8"
)

// The lines of a log, and the errors of an agent, are what a sandbox sends.
func FuzzAgentText(f *testing.F) {
	f.Add([]byte(`{"timestamp":"2026-01-02T03:04:05Z","source":"agent","stream":"stderr","line":"x","level":"WARN"}`+"\n{}\n"), 404)
	f.Add([]byte(`{"code":404,"message":"not found"}`), 404)
	f.Add(bytes.Repeat([]byte("x"), maxLine+1), 500)
	f.Fuzz(func(t *testing.T, b []byte, status int) {
		size := 0
		err := readLines(bytes.NewReader(b), false, func(l LogLine) error {
			size += len(l.Line)
			_ = l.Severity()
			return nil
		})
		if size > keptLog {
			t.Errorf("%d bytes of lines, %v", size, err)
		}
		err = readError(&http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewReader(b))})
		if e := (*Error)(nil); !errors.As(err, &e) || e.Status != status || len(e.Message) > maxText || !utf8.ValidString(e.Message) {
			t.Errorf("error %+v", err)
		}
		var out struct{ Any any }
		_ = readAnswer(bytes.NewReader(b), &out)
	})
}
