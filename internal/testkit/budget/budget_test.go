package budget

import (
	"flag"
	"fmt"
	"testing"
	"time"
)

func TestNeed(t *testing.T) {
	later, earlier := fmt.Sprint(time.Now().Add(time.Hour).Unix()), fmt.Sprint(time.Now().Add(-time.Hour).Unix())
	selected := flag.Lookup("test.run").Value.String()
	t.Cleanup(func() { _ = flag.Set("test.run", selected) })
	for _, test := range []struct {
		until, run string
		skips      bool
	}{
		{"", "", false},
		{"soon", "", false},
		{later, "", false},
		{earlier, "", true},
		{earlier, "TestNeed", false},
	} {
		t.Run("until "+test.until+" run "+test.run, func(t *testing.T) {
			t.Setenv(Variable, test.until)
			if err := flag.Set("test.run", test.run); err != nil {
				t.Fatal(err)
			}
			skipped := true
			t.Run("test", func(t *testing.T) {
				Need(t)
				skipped = false
			})
			if skipped != test.skips {
				t.Errorf("skipped = %t, want %t", skipped, test.skips)
			}
		})
	}
}
