package harness

import (
	"encoding/json"
	"testing"
)

func TestReadSteps(t *testing.T) {
	const metrics = "# HELP barchan_node_step_seconds Time.\n" +
		"barchan_node_step_seconds_bucket{runtime=\"gvisor\",step=\"start\",le=\"0.1\"} 1\n" +
		"barchan_node_step_seconds_sum{runtime=\"gvisor\",step=\"start\"} 0.25\n" +
		"barchan_node_step_seconds_count{runtime=\"gvisor\",step=\"start\"} 2\n" +
		"barchan_node_step_seconds_sum{runtime=\"runc\",step=\"start\"} 9\n"
	got, err := readSteps(metrics, "gvisor")
	if err != nil || len(got) != 1 || got["start"] != (StepTime{0.25, 2}) {
		t.Errorf("steps = %v, %v", got, err)
	}
}

func TestTemplatesAreJSON(t *testing.T) {
	var v map[string]any
	if err := json.Unmarshal([]byte((Template{Name: "bench-runc", Class: "runc"}).json()), &v); err != nil {
		t.Error(err)
	}
}

// TestRounds: a trial has fewer, but more than one.
func TestRounds(t *testing.T) {
	for n, want := range map[int]int{500: 50, 3: 2} {
		if got := (&Bench{Quick: true}).Rounds(n); got != want {
			t.Errorf("%d rounds in a trial: %d, want %d", n, got, want)
		}
	}
}
