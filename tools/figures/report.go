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

// objects is the chapter of what grows with the number of objects.
const objects = "objects"

func (r *report) hasObjects() bool {
	return slices.ContainsFunc(r.Figures, func(f *figure) bool { return f.Group == objects })
}

// isWhole reports whether a report is of more than that chapter.
func (r *report) isWhole() bool {
	return !r.hasObjects() || slices.ContainsFunc(r.Figures, func(f *figure) bool { return f.Group == "create" })
}

// grown is a row of the table of growth, as it is printed.
type grown struct {
	Number                                        int
	RSS, Heap, CPU, REST, Kube, List, Watch, Boot string
}

// sizes returns the numbers of sandboxes that slept.
func (r *report) sizes() (all []int) {
	for _, f := range r.Figures {
		var n int
		if c, err := fmt.Sscanf(f.Name, "barchan ls, %d asleep", &n); err == nil && c == 1 && f.Group == objects {
			all = append(all, n)
		}
	}
	return all
}

// Sizes is the argument of the command that measured them.
func (r *report) Sizes() string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(r.sizes()), " ", ","), "[]")
}

// Growth returns a row for each number of sandboxes.
func (r *report) Growth() (rows []grown, err error) {
	for _, n := range r.sizes() {
		row := grown{Number: n}
		for format, cell := range map[string]*string{
			"server RSS with %d asleep, beyond that with none, each": &row.RSS,
			"heap with %d asleep, beyond that with none, each":       &row.Heap,
			"CPU of the server and containerd at rest, %d asleep":    &row.CPU,
			"page of 100 by REST, %d asleep":                         &row.REST,
			"page of 100 by the Kubernetes API, %d asleep":           &row.Kube,
			"barchan ls, %d asleep":                                  &row.List,
			"start of a watch, until it has all %d":                  &row.Watch,
			"boot to ready, %d asleep":                               &row.Boot,
		} {
			f, err := r.find(objects, fmt.Sprintf(format, n))
			if err != nil {
				return nil, err
			}
			*cell = number(f.Median)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// Help returns the median of a command that asks no server, in milliseconds.
func (r *report) Help() (string, error) {
	for _, f := range r.Figures {
		if f.Group == objects && strings.HasPrefix(f.Name, "barchan ls, ") && f.Floor != nil {
			return number(f.Floor.Median), nil
		}
	}
	return "", errors.New("the report lacks the floor of barchan ls")
}

// number prints three significant digits, and whole numbers from 100 on.
func number(v float64) string {
	digits := 3
	for limit := 1.0; digits > 0 && math.Abs(v) >= limit; limit *= 10 {
		digits--
	}
	return fmt.Sprintf("%.*f", digits, v)
}
