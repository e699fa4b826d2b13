package peers

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// TestWireHasAllOfARoute fails when route.Route has a field that the wire does not carry.
func TestWireHasAllOfARoute(t *testing.T) {
	var give push.Route
	fill(t, reflect.ValueOf(&give).Elem())
	text, err := json.Marshal(push.RecordOf(&give))
	if err != nil {
		t.Fatal(err)
	}
	var w push.Record
	if err := json.Unmarshal(text, &w); err != nil {
		t.Fatal(err)
	}
	if got := w.Route(); got != give {
		t.Errorf("got %+v\nwant %+v", got, give)
	}
}

func fill(t *testing.T, v reflect.Value) {
	if v.Type() == reflect.TypeFor[netip.Addr]() {
		v.Set(reflect.ValueOf(netip.MustParseAddr("10.1.2.3")))
		return
	}
	switch v.Kind() { //nolint:exhaustive // the rest fails below
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(7)
	case reflect.Struct:
		for _, f := range v.Fields() {
			fill(t, f)
		}
	default:
		t.Fatalf("a route has a %s: carry it and fill it here", v.Type())
	}
}

func TestCheck(t *testing.T) {
	good := testRoute(1, "1")
	long := strings.Repeat("x", 600)
	for field, spoil := range map[string]func(*route.Route){
		"rv":      func(r *route.Route) { r.ResourceVersion = "0" },
		"uid":     func(r *route.Route) { r.UID = "" },
		"id":      func(r *route.Route) { r.ID = "i0000000000000000000" },
		"ns":      func(r *route.Route) { r.Namespace = long },
		"name":    func(r *route.Route) { r.Name = "" },
		"state":   func(r *route.Route) { r.State = "Odd" },
		"addr":    func(r *route.Route) { r.Address = netip.MustParseAddr("224.0.0.1") },
		"mask":    func(r *route.Route) { r.Access.MaskRequestHost = long },
		"wakeFor": func(r *route.Route) { r.Wake.Timeout = -time.Second },
		"life":    func(r *route.Route) { r.EpochKey = "<" },
		"idle":    func(r *route.Route) { r.Idle.After = -time.Second },
		"rate":    func(r *route.Route) { r.Access.RequestsPerSecond = -1 },
	} {
		bad := good
		spoil(&bad)
		w := push.RecordOf(&push.Route{Route: bad})
		if err := w.Check(); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, version := range []string{"", "abc", "-1", "01", "1.5", "9999999999999999999999"} {
		if push.WellFormed(version) {
			t.Errorf("version %q is taken", version)
		}
	}
	w := push.RecordOf(&push.Route{Route: good})
	if err := w.Check(); err != nil {
		t.Error(err)
	}
}

// TestLargestBatchFits keeps the two limits together.
func TestLargestBatchFits(t *testing.T) {
	long := strings.Repeat("\x01", push.MaxText) // six bytes each in JSON
	b := push.Batch{Version: push.Version, From: long, Boot: long, To: long, Seq: 1<<64 - 1}
	for range push.MaxBatch {
		r := testRoute(1, strings.Repeat("9", push.MaxVersion))
		r.Namespace, r.Name = strings.Repeat("s", push.MaxText), strings.Repeat("n", push.MaxText)
		r.EpochKey, r.Access.MaskRequestHost = strings.Repeat("l", push.MaxEpochKey), strings.Repeat("m", push.MaxText)
		r.UID = types.UID(strings.Repeat("u", push.MaxText))
		r.ID = sandbox.IDOf(r.UID)
		w := push.RecordOf(&push.Route{Route: r, Deleted: true})
		if err := w.Check(); err != nil {
			t.Fatal(err)
		}
		b.Routes = append(b.Routes, w)
	}
	text, err := json.Marshal(b)
	if err != nil || len(text) > push.MaxBody {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

func FuzzReadBatch(f *testing.F) {
	w := push.RecordOf(&push.Route{Route: testRoute(1, "5")})
	for _, b := range []push.Batch{{}, {Version: push.Version}, {Version: push.Version, From: "a", Boot: "b", To: "c", Seq: 3, Routes: []push.Record{w, w}}} {
		text, err := json.Marshal(b)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
		f.Add(append(text, '{'))
	}
	f.Add([]byte(`{"v":1,"routes":[null]}`))
	f.Add([]byte(`{"v":1,"routes":[{"addr":"fe80::1%eth0"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		b, err := push.ReadBatch(bytes.NewReader(text))
		if err != nil {
			if k := errs.Kind(err); k == nil {
				t.Fatalf("error without a kind: %v", err)
			}
			return
		}
		routes, err := b.Take()
		if err != nil {
			return
		}
		// What is accepted can be forwarded unchanged.
		for _, r := range routes {
			w := push.RecordOf(&r)
			if err := w.Check(); err != nil || w.Route() != r {
				t.Fatalf("%+v: %v", r, err)
			}
		}
	})
}
