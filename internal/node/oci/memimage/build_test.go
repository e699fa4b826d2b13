package memimage

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"unsafe"
)

// Lists that are equal are decoded once, and whatever is decoded equals what was encoded, however many there are.
func TestFeaturesAreShared(t *testing.T) {
	decode := func(list Features) (got Build) {
		t.Helper()
		text, err := json.Marshal(Build{CPUFeatures: list})
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.CPUFeatures, list) {
			t.Fatalf("%q became %q", list, got.CPUFeatures)
		}
		return got
	}
	list := Features{"sse", "avx"}
	one, two := decode(list), decode(list)
	if unsafe.SliceData(one.CPUFeatures) != unsafe.SliceData(two.CPUFeatures) {
		t.Error("equal lists do not share their memory")
	}
	if _ = append(one.CPUFeatures, "sgx"); !slices.Equal(decode(list).CPUFeatures, list) {
		t.Error("a list has changed with another")
	}
	for i := range 3 * maxShared {
		decode(Features{fmt.Sprint(i)})
	}
	decode(Features{})
	decode(nil)
	if shared.Lock(); len(shared.lists) > maxShared {
		t.Errorf("%d lists are kept", len(shared.lists))
	}
	shared.Unlock()
	var b Build
	if err := json.Unmarshal([]byte(`{"cpuFeatures": [1]}`), &b); err == nil {
		t.Error("a number is no feature")
	}
}
