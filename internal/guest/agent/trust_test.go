package agent

import (
	"strings"
	"testing"
)

func TestCheckBundle(t *testing.T) {
	good := "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	for text, ok := range map[string]bool{"": true, good: true, good + good: true, "x": false, good + "x": false, strings.ReplaceAll(good, "CERTIFICATE", "PRIVATE KEY"): false} {
		if err := checkBundle(text); (err == nil) != ok {
			t.Errorf("%q: %v", text, err)
		}
	}
}
