package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// TestIDOfIsWhatItWas compares with digits of a large number, since an ID must never change.
func TestIDOfIsWhatItWas(t *testing.T) {
	for i := range 10_000 {
		uid := types.UID(fmt.Sprint("uid-", i))
		sum := sha256.Sum256([]byte(uid))
		digits := new(big.Int).SetBytes(sum[:]).Text(36)
		if want := ID("i" + digits[len(digits)-19:]); IDOf(uid) != want {
			t.Fatalf("IDOf(%q) = %q, want %q", uid, IDOf(uid), want)
		}
	}
	if got := IDOf("001dad3f-6104-4675-a026-aefc48549905"); got != "if2vakwjz4iyk00b1z9t" {
		t.Errorf("an ID of an earlier version is now %q", got)
	}
}

func BenchmarkIDOf(b *testing.B) {
	for b.Loop() {
		IDOf("001dad3f-6104-4675-a026-aefc48549905")
	}
}

func TestIDOf(t *testing.T) {
	seen := map[ID]bool{}
	for _, uid := range []types.UID{"", "a", "6f1f1b9c-5d1e-4f5e-9f53-0d1b9c5b0001", "6f1f1b9c-5d1e-4f5e-9f53-0d1b9c5b0002"} {
		id := IDOf(uid)
		if parsed, err := ParseID(string(id)); err != nil || parsed != id {
			t.Errorf("ParseID(IDOf(%q)) = %q, %v", uid, parsed, err)
		}
		if seen[id] || IDOf(uid) != id {
			t.Errorf("IDOf(%q) = %q is not unique and stable", uid, id)
		}
		seen[id] = true
	}
}

func TestParseID(t *testing.T) {
	good := string(IDOf("x"))
	for name, give := range map[string]struct {
		text string
		ok   bool
	}{
		"alone":       {good, true},
		"with client": {good + "-abc123", true},
		"short":       {good[1:], false},
		"long":        {good + "a", false},
		"upper case":  {strings.ToUpper(good), false},
		"empty":       {"", false},
		"path":        {"../../../../etc/pass", false},
	} {
		t.Run(name, func(t *testing.T) {
			id, err := ParseID(give.text)
			if (err == nil) != give.ok || (give.ok && string(id) != good) {
				t.Fatalf("ParseID(%q) = %q, %v", give.text, id, err)
			}
			if err != nil && !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("kind of %v is not ErrInvalid", err)
			}
		})
	}
}

func FuzzParseID(f *testing.F) {
	f.Add(string(IDOf("x")))
	f.Add("i-")
	f.Fuzz(func(t *testing.T, text string) {
		id, err := ParseID(text)
		if err == nil && (len(id) != idLength || strings.ToLower(string(id)) != string(id) || strings.ContainsAny(string(id), "./-%")) {
			t.Errorf("ParseID(%q) = %q", text, id)
		}
	})
}

func TestPhaseOf(t *testing.T) {
	condition := func(kind, status, reason string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionStatus(status), Reason: reason}
	}
	now := metav1.Now()
	started := []string{"10.0.0.2"}
	for name, give := range map[string]struct {
		mode  agents.OperatingMode
		ips   []string
		conds []metav1.Condition
		gone  bool
		want  Phase
	}{
		"new":               {want: Pending},
		"booting":           {ips: started, want: Starting},
		"ready":             {ips: started, conds: []metav1.Condition{condition("Ready", "True", "DependenciesReady")}, want: Running},
		"to sleep":          {mode: agents.ModeSuspended, ips: started, conds: []metav1.Condition{condition("Ready", "True", "DependenciesReady")}, want: Pausing},
		"suspended":         {mode: agents.ModeSuspended, ips: started, conds: []metav1.Condition{condition("Suspended", "True", "PodTerminated")}, want: Paused},
		"waking":            {mode: agents.ModeRunning, ips: started, conds: []metav1.Condition{condition("Suspended", "True", "PodTerminated")}, want: Resuming},
		"not resumed":       {mode: agents.ModeRunning, conds: []metav1.Condition{condition("Suspended", "True", "PodTerminated"), condition("Ready", "False", ReasonResumeFailed)}, want: Paused},
		"ended":             {ips: started, conds: []metav1.Condition{condition("Finished", "True", "PodFailed")}, want: Dead},
		"expired":           {conds: []metav1.Condition{condition("Ready", "False", "SandboxExpired")}, want: Dead},
		"entrypoint failed": {ips: started, conds: []metav1.Condition{condition("Ready", "False", "PodFailed")}, want: Running},
		"not ready":         {ips: started, conds: []metav1.Condition{condition("Ready", "False", "DependenciesNotReady")}, want: Starting},
		"deleted":           {ips: started, gone: true, conds: []metav1.Condition{condition("Ready", "True", "DependenciesReady")}, want: Stopping},
	} {
		t.Run(name, func(t *testing.T) {
			s := &agents.Sandbox{Spec: agents.SandboxSpec{OperatingMode: give.mode}, Status: agents.SandboxStatus{PodIPs: give.ips, Conditions: give.conds}}
			if give.gone {
				s.DeletionTimestamp = &now
			}
			if got := PhaseOf(s); got != give.want {
				t.Errorf("PhaseOf = %s, want %s", got, give.want)
			}
		})
	}
}

func TestEndOf(t *testing.T) {
	at := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	earlier := metav1.NewTime(at.Add(-time.Minute))
	condition := func(kind, status, reason, text string) []metav1.Condition {
		return []metav1.Condition{{Type: kind, Status: metav1.ConditionStatus(status), Reason: reason, Message: text}}
	}
	for name, give := range map[string]struct {
		conds          []metav1.Condition
		deleted, limit *metav1.Time
		want           string
	}{
		"runs":                   {limit: &at},
		"failed":                 {conds: condition("Finished", "True", "PodFailed", "out of memory"), deleted: &at, want: "out of memory"},
		"failed without a word":  {conds: condition("Finished", "True", "PodFailed", ""), want: "PodFailed"},
		"killed":                 {deleted: &at, want: "it was killed at 2026-01-02T03:04:05Z"},
		"killed before its time": {deleted: &earlier, limit: &at, want: "it was killed at 2026-01-02T03:03:05Z"},
		"timed out":              {deleted: &at, limit: &at, want: "its timeout passed at 2026-01-02T03:04:05Z"},
		"timed out and retained": {conds: condition("Ready", "False", "SandboxExpired", ""), limit: &at, want: "its timeout passed at 2026-01-02T03:04:05Z"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &agents.Sandbox{Status: agents.SandboxStatus{Conditions: give.conds}}
			s.DeletionTimestamp, s.Spec.ShutdownTime = give.deleted, give.limit
			if got := EndOf(s); got != give.want {
				t.Errorf("got %q, want %q", got, give.want)
			}
		})
	}
}

func TestTokens(t *testing.T) {
	if _, err := NewTokens([]byte("short")); !errors.Is(err, errs.ErrInvalid) {
		t.Fatalf("NewTokens(short) = %v, want ErrInvalid", err)
	}
	a, err := NewTokens([]byte(strings.Repeat("a", 32)))
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewTokens([]byte(strings.Repeat("b", 32)))
	if err != nil {
		t.Fatal(err)
	}
	all := []string{a.Agent("x"), a.Agent("y"), a.Traffic("x"), b.Agent("x")}
	slices.Sort(all)
	if len(slices.Compact(all)) != 4 {
		t.Error("tokens of other purposes, IDs or secrets coincide")
	}
	keys := map[string]bool{}
	for _, from := range []*Tokens{a, b, a} {
		for _, purpose := range []string{"agent", "gossip"} {
			key, err := from.Derive(purpose)
			if err != nil || len(key) != 32 || hex.EncodeToString(key) == from.Agent("") {
				t.Errorf("derived %x, %v", key, err)
			}
			keys[string(key)] = true
		}
	}
	if len(keys) != 4 {
		t.Errorf("%d keys of two purposes and two secrets", len(keys))
	}
	if !EqualToken(a.Agent("x"), a.Agent("x")) || EqualToken(a.Agent("x"), a.Agent("y")) || EqualToken("", a.Agent("x")) {
		t.Error("EqualToken is wrong")
	}
}
