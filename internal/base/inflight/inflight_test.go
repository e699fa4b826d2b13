package inflight

import "testing"

func TestCounter(t *testing.T) {
	var c Counter[string]
	for i, want := range []bool{true, true, false} {
		if earlier, ok := c.Take("a", 2); ok != want || earlier != i {
			t.Errorf("take %d: %d earlier, %v", i, earlier, ok)
		}
	}
	if _, ok := c.Take("b", 2); !ok {
		t.Error("one key counts for another")
	}
	c.Release("a")
	if earlier, ok := c.Take("a", 2); !ok || earlier != 1 {
		t.Errorf("after a release: %d earlier, %v", earlier, ok)
	}
	for range 2 {
		c.Release("a")
	}
	c.Release("b")
	if len(c.n) != 0 {
		t.Errorf("keys without anything in progress stay: %v", c.n)
	}
}
