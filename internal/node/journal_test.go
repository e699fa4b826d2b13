package node

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/node/plan"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// A row is acted on only if all of it is understood.
func TestDecodeRow(t *testing.T) {
	ref := sandbox.Ref{Namespace: "a", Name: "s", UID: "one"}
	sound := row{Stage: live, Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID)}, Address: netip.MustParseAddr("10.0.0.2")}
	for name, tt := range map[string]struct {
		change func(*row)
		says   string // part of the error; empty for none
	}{
		"sound":               {func(*row) {}, ""},
		"half made":           {func(r *row) { r.Stage, r.Address = making, netip.Addr{} }, ""},
		"another's key":       {func(r *row) { r.Plan.Ref.UID = "two" }, "another key"},
		"another's ID":        {func(r *row) { r.Plan.ID = "x" }, "another sandbox's"},
		"a later stage":       {func(r *row) { r.Stage = "flying" }, "not known"},
		"alive, no address":   {func(r *row) { r.Address = netip.Addr{} }, "has the address"},
		"asleep, no address":  {func(r *row) { r.Stage, r.Address = stored, netip.Addr{} }, ""},
		"asleep, files only":  {func(r *row) { r.Stage, r.Kept = stored, agents.SuspendFiles }, ""},
		"keeps the unknown":   {func(r *row) { r.Stage, r.Kept = stored, "Dreams" }, "not known"},
		"frozen, no address":  {func(r *row) { r.Stage, r.Address = paused, netip.Addr{} }, "has the address"},
		"asleep, only IPv6":   {func(r *row) { r.Stage, r.Address = stored, netip.MustParseAddr("fd00::1") }, "has the address"},
		"removed, no address": {func(r *row) { r.Stage, r.Address = removing, netip.Addr{} }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			give := sound
			tt.change(&give)
			value, err := json.Marshal(give)
			must(t, err)
			_, err = decodeRow([]byte(ref.UID), value)
			if (err == nil) != (tt.says == "") || (err != nil && !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("error %v, want %q", err, tt.says)
			}
		})
	}
}

func FuzzDecodeRow(f *testing.F) {
	f.Add([]byte("one"), []byte(`{"stage":"live","plan":{"ref":{"UID":"one"},"id":"x"},"address":"10.0.0.2"}`))
	f.Add([]byte("one"), []byte(`{}`))
	f.Fuzz(func(_ *testing.T, key, value []byte) {
		r, err := decodeRow(key, value)
		if err == nil && r.Stage.begun() {
			_ = (&operation{n: &Node{}, row: r}).endpoint() // must not panic on what it accepted
		}
	})
}
