package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// TestEach: every failure is reported, whatever its kind, and none stops the others.
func TestEach(t *testing.T) {
	var out, errOut bytes.Buffer
	a := &App{Stdout: &out, Stderr: &errOut}
	err := a.Each([]string{"a", "b", "c"}, func(arg string) (string, error) {
		if arg == "b" {
			return arg, nil
		}
		return arg, NoSnapshot(arg)
	})
	want := "barchan: snapshot \"a\" not found; `barchan snapshot ls` lists them\nbarchan: snapshot \"c\" not found; `barchan snapshot ls` lists them\n"
	if !errors.Is(err, ExitCode(CodeError)) || out.String() != "b\n" || errOut.String() != want {
		t.Errorf("%v, %q, %q", err, out.String(), errOut.String())
	}
	if err := a.Each([]string{"a", "b"}, func(string) (string, error) { return "", context.Canceled }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that of the context", err)
	}
	out.Reset()
	a.JSON = true
	err = a.Each([]string{"a", "b", "c"}, func(arg string) (string, error) {
		switch arg {
		case "a":
			return "id-of-a", nil
		case "b":
			return "", NoSnapshot(arg)
		}
		return "", context.Canceled
	})
	var got []outcome
	if unread := json.Unmarshal(out.Bytes(), &got); unread != nil || !errors.Is(err, context.Canceled) || len(got) != 2 || got[0] != (outcome{Name: "a", ID: "id-of-a"}) || got[1].Error == "" || got[1].ID != "" {
		t.Errorf("%v, %v, JSON %s", err, unread, out.String())
	}
}

func TestForOthers(t *testing.T) {
	refused := errs.Public(errs.ErrForbidden, "for root only")
	if got := forOthers(refused, "set X"); Message(got) != "for root only, or set X" || !errors.Is(got, errs.ErrForbidden) {
		t.Errorf("%v", got)
	}
	if got := forOthers(errs.ErrNotFound, "set X"); !errors.Is(got, errs.ErrNotFound) || Message(got) != "not found" {
		t.Errorf("%v", got)
	}
}
