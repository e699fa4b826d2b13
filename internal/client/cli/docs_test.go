package cli

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
)

var update = flag.Bool("update", false, "write docs/cli.md")

// TestDocsAreFresh compares docs/cli.md with the commands; generate.sh writes it.
func TestDocsAreFresh(t *testing.T) {
	const file = "../../../docs/cli.md"
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
		t.Error("docs/cli.md differs from the commands; run internal/client/cli/generate.sh")
	}
}

// TestHelpFitsATerminal: no line of help has more than 120 characters, but for those of settings.
func TestHelpFitsATerminal(t *testing.T) {
	settings := map[string]bool{}
	defaults := config.Default()
	for _, s := range defaults.Settings() {
		settings["--"+s.Flag()] = true
	}
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		c.InitDefaultHelpFlag()
		for line := range strings.Lines(c.Long + "\n" + c.UsageString()) {
			if words := strings.Fields(line); utf8.RuneCountInString(line) > 121 && !settings[words[0]] {
				t.Errorf("%s: %s", c.CommandPath(), line)
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(root((&app.App{})))
}
