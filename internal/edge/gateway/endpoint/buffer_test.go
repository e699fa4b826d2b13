package endpoint

import "testing"

// TestManyBuffers requires that copies that wait for slow readers have small blocks when there are many.
func TestManyBuffers(t *testing.T) {
	var all []*Buffer
	big := 0
	for range 2 * maxBig {
		b := NewBuffer(-1)
		b.Adapt(smallBlock) // it was full
		if all = append(all, b); len(b.Buf) == bigBlock {
			big++
		}
	}
	if big != maxBig {
		t.Errorf("%d large blocks are in use, want %d", big, maxBig)
	}
	for _, b := range all {
		b.Free()
	}
	if b := NewBuffer(bigBlock); len(b.Buf) != bigBlock {
		t.Error("the large blocks are not free again")
	} else {
		b.Free()
	}
}
