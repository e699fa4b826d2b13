package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// report is what the pictures need of a run; test/bench/report has all of it.
type report struct {
	Began   time.Time `json:"began"`
	Ended   time.Time `json:"ended"`
	Machine string    `json:"machine"`
	Version string    `json:"version"`
	Load    string    `json:"load"`
	Quick   bool      `json:"quick"`
	Note    string    `json:"note"`
	Figures []*figure `json:"figures"`
	Steps   []step    `json:"steps"`
}

type figure struct {
	Group     string    `json:"group"`
	Name      string    `json:"name"`
	Median    float64   `json:"median"`
	P99       float64   `json:"p99"`
	N         int       `json:"n"`
	Quantiles []float64 `json:"quantiles"` // at equal distances from 0 to 100 %
	Floor     *struct {
		Name   string  `json:"name"`
		Median float64 `json:"median"`
	} `json:"floor"`
}

type step struct {
	Class string  `json:"class"`
	Name  string  `json:"name"`
	Mean  float64 `json:"meanMilliseconds"`
}

// lastReport returns the last run of a report or history, as it stands there and read.
func lastReport(text []byte) (raw json.RawMessage, r *report, err error) {
	for dec := json.NewDecoder(bytes.NewReader(text)); ; {
		var next json.RawMessage
		if err := dec.Decode(&next); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, nil, err
		}
		raw = next
	}
	if raw == nil {
		return nil, nil, errors.New("the file has no report")
	}
	r = &report{}
	return raw, r, json.Unmarshal(raw, r)
}

// find returns a figure. All pictures are of one run: what it did not measure is an error.
func (r *report) find(group, name string) (*figure, error) {
	for _, f := range r.Figures {
		if f.Group == group && f.Name == name {
			return f, nil
		}
	}
	return nil, fmt.Errorf("the report lacks %q of the chapter %s; run `make figures`, which measures all that it draws", name, group)
}

// mean returns the mean of steps that follow each other, in milliseconds.
func (r *report) mean(class string, names ...string) (sum float64, err error) {
	for _, name := range names {
		i := slices.IndexFunc(r.Steps, func(s step) bool { return s.Class == class && s.Name == name })
		if i < 0 {
			return 0, fmt.Errorf("the report lacks the step %q of %s; run `make figures`, which measures all that it draws", name, class)
		}
		sum += r.Steps[i].Mean
	}
	return sum, nil
}

func (r *report) Seconds() float64 { return r.Ended.Sub(r.Began).Seconds() }

func (r *report) Date() string { return r.Began.UTC().Format("2006-01-02 15:04 MST") }

// RuncBoot returns how many sandboxes of runc a boot adopted; empty if none did.
func (r *report) RuncBoot() string {
	for _, f := range r.Figures {
		if n, ok := strings.CutSuffix(strings.TrimPrefix(f.Name, "boot to ready, "), " sandboxes of runc adopted"); ok {
			return n
		}
	}
	return ""
}

// number prints three significant digits, and whole numbers from 100 on.
func number(v float64) string {
	digits := 3
	for limit := 1.0; digits > 0 && math.Abs(v) >= limit; limit *= 10 {
		digits--
	}
	return fmt.Sprintf("%.*f", digits, v)
}
