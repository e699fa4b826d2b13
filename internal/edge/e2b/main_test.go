package e2b_test

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crowdServer); dir != "" {
		serveCrowd(dir)
		return
	}
	os.Exit(m.Run())
}
