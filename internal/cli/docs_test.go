package cli

import (
	"bytes"
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write docs/cli.md")

// TestDocsAreFresh compares docs/cli.md with the commands; generate.sh writes it.
func TestDocsAreFresh(t *testing.T) {
	const file = "../../docs/cli.md"
	var want bytes.Buffer
	WriteDocs(&want)
	if *update {
		if err := os.WriteFile(file, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want.Bytes()) {
		t.Error("docs/cli.md is not what the commands say; run internal/cli/generate.sh")
	}
}
