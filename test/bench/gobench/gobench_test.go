package gobench

import "testing"

func TestParse(t *testing.T) {
	const out = "goos: linux\n" +
		"BenchmarkAPI/floor/etcd-create-2 \t 2000\t 639000 ns/op\t 612.5 p50-µs\t 900.0 p99-µs\n" +
		"BenchmarkAPI/get \t 2000\t 150000 ns/op\t 148.0 p50-µs\n" +
		"BenchmarkOther/get-2 \t 1\t 7 ns/op\n" +
		"PASS\n"
	got := parse(out, "BenchmarkAPI/")
	if len(got) != 2 {
		t.Fatalf("%d cases, want 2: %v", len(got), got)
	}
	if c := got["floor/etcd-create"]; c.N != 2000 || c.P50() != 0.6125 || c.P99() != 0.9 {
		t.Errorf("the floor = %+v", c)
	}
	if c := got["get"]; c.P50() != 0.148 {
		t.Errorf("get = %+v", c)
	}
}

// TestHasSource: claims without a node are measured in the source tree, and left out elsewhere.
func TestHasSource(t *testing.T) {
	if HasSource() {
		t.Error("the directory of a package is the source tree")
	}
	t.Chdir("../../..")
	if !HasSource() {
		t.Error("the source tree is none")
	}
}
