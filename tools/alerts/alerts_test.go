// Package alerts tests the alert rules of packaging by Prometheus' own engine. Its files are those of `promtool test rules`,
// which does the same but takes four times as long to build.
package alerts

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/model/timestamp"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/template"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
	"gopkg.in/yaml.v3"
)

// file is what promtool reads, without what our file lacks.
type file struct {
	RuleFiles          []string       `yaml:"rule_files"`
	EvaluationInterval model.Duration `yaml:"evaluation_interval"`
	Tests              []struct {
		Name        string         `yaml:"name"`
		Interval    model.Duration `yaml:"interval"`
		InputSeries []struct {
			Series string `yaml:"series"`
			Values string `yaml:"values"`
		} `yaml:"input_series"`
		Exprs []struct {
			Expr    string         `yaml:"expr"`
			At      model.Duration `yaml:"eval_time"`
			Samples []struct {
				Labels string  `yaml:"labels"`
				Value  float64 `yaml:"value"`
			} `yaml:"exp_samples"`
		} `yaml:"promql_expr_test"`
		Alerts []struct {
			At     model.Duration `yaml:"eval_time"`
			Name   string         `yaml:"alertname"`
			Alerts []struct {
				Labels      map[string]string `yaml:"exp_labels"`
				Annotations map[string]string `yaml:"exp_annotations"`
			} `yaml:"exp_alerts"`
		} `yaml:"alert_rule_test"`
	} `yaml:"tests"`
}

var language = parser.NewParser(parser.Options{})

// TestAlerts evaluates the rules over the series of each test, and asks what fires.
func TestAlerts(t *testing.T) {
	const dir = "../../packaging/prometheus"
	text, err := os.ReadFile(filepath.Join(dir, "alerts_test.yaml"))
	must(t, err)
	var f file
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	d.KnownFields(true)
	must(t, d.Decode(&f))
	var rules []rulefmt.Rule
	for _, name := range f.RuleFiles {
		groups, errs := rulefmt.ParseFile(filepath.Join(dir, name), false, model.UTF8Validation, language, slog.New(slog.DiscardHandler))
		for _, err := range errs {
			t.Fatal(err)
		}
		for _, g := range groups.Groups {
			rules = append(rules, g.Rules...)
		}
	}
	if len(rules) == 0 || len(f.Tests) == 0 {
		t.Fatalf("%d rules, %d tests", len(rules), len(f.Tests))
	}
	for _, test := range f.Tests {
		t.Run(test.Name, func(t *testing.T) {
			s := &series{engine: promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, Parser: language})}
			var length time.Duration
			for _, in := range test.InputSeries {
				length = max(length, s.load(t, in.Series, in.Values, time.Duration(test.Interval)))
			}
			fired := map[time.Duration][]alert{}
			active := map[string]time.Duration{}
			for at := time.Duration(0); at <= length; at += time.Duration(f.EvaluationInterval) {
				for _, r := range rules {
					fired[at] = append(fired[at], s.evaluate(t, r, at, active)...)
				}
			}
			for _, e := range test.Exprs {
				var got, want []string
				for _, sample := range s.query(t, e.Expr, time.Duration(e.At)) {
					got = append(got, fmt.Sprint(sample.Metric, sample.F))
				}
				for _, sample := range e.Samples {
					l, _, err := language.ParseSeriesDesc(sample.Labels + " _")
					must(t, err)
					want = append(want, fmt.Sprint(l, sample.Value))
				}
				same(t, e.Expr, got, want)
			}
			for _, e := range test.Alerts {
				var got, want []string
				for _, a := range fired[time.Duration(e.At)] {
					if a.labels.Get(labels.AlertName) == e.Name {
						got = append(got, fmt.Sprint(labels.NewBuilder(a.labels).Del(labels.AlertName).Labels(), a.annotations))
					}
				}
				for _, a := range e.Alerts {
					want = append(want, fmt.Sprint(labels.FromMap(a.Labels), a.Annotations))
				}
				same(t, e.Name, got, want)
			}
		})
	}
}

// alert is one that fires.
type alert struct {
	labels      labels.Labels
	annotations map[string]string
}

// series are samples in memory.
type series struct {
	engine *promql.Engine
	all    []*oneSeries
}

type oneSeries struct {
	labels  labels.Labels
	samples []chunks.Sample
}

type sample struct {
	t int64
	f float64
}

func (s sample) T() int64                      { return s.t }
func (s sample) ST() int64                     { return 0 }
func (s sample) F() float64                    { return s.f }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }

// load adds a series in the notation of promtool, and returns how long it is.
func (s *series) load(t *testing.T, name, values string, interval time.Duration) time.Duration {
	t.Helper()
	l, all, err := language.ParseSeriesDesc(name + " " + values)
	must(t, err)
	for i, v := range all {
		if !v.Omitted {
			s.add(l, time.Duration(i)*interval, v.Value)
		}
	}
	return time.Duration(len(all)-1) * interval
}

func (s *series) add(l labels.Labels, at time.Duration, value float64) {
	i := slices.IndexFunc(s.all, func(o *oneSeries) bool { return labels.Equal(o.labels, l) })
	if i < 0 {
		i, s.all = len(s.all), append(s.all, &oneSeries{labels: l})
	}
	s.all[i].samples = append(s.all[i].samples, sample{at.Milliseconds(), value})
}

// evaluate records the states of one rule's alerts, and returns those that fire. Of active it keeps since when each has been.
func (s *series) evaluate(t *testing.T, r rulefmt.Rule, at time.Duration, active map[string]time.Duration) []alert {
	t.Helper()
	var firing []alert
	seen := map[string]bool{}
	for _, sample := range s.query(t, r.Expr, at) {
		expand := func(text string) string {
			data := template.AlertTemplateData(sample.Metric.Map(), nil, "", promql.Sample{F: sample.F})
			text = "{{$labels := .Labels}}{{$value := .Value}}" + text
			out, err := template.NewTemplateExpander(t.Context(), text, r.Alert, data, model.Time(at.Milliseconds()), nil, &url.URL{}, nil).Expand()
			must(t, err)
			return out
		}
		b := labels.NewBuilder(sample.Metric).Del(labels.MetricName).Set(labels.AlertName, r.Alert)
		for name, value := range r.Labels {
			b.Set(name, expand(value))
		}
		a := alert{b.Labels(), map[string]string{}}
		key := a.labels.String()
		seen[key] = true
		since, was := active[key]
		if !was {
			since, active[key] = at, at
		}
		state := "pending"
		if at-since >= time.Duration(r.For) {
			state = "firing"
			for name, text := range r.Annotations {
				a.annotations[name] = expand(text)
			}
			firing = append(firing, a)
		}
		s.add(labels.NewBuilder(a.labels).Set(labels.MetricName, "ALERTS").Set("alertstate", state).Labels(), at, 1)
	}
	for key := range active {
		if !seen[key] && strings.Contains(key, fmt.Sprintf("alertname=%q", r.Alert)) {
			delete(active, key)
		}
	}
	return firing
}

func (s *series) query(t *testing.T, expr string, at time.Duration) promql.Vector {
	t.Helper()
	q, err := s.engine.NewInstantQuery(t.Context(), s, nil, expr, timestamp.Time(at.Milliseconds()))
	must(t, err)
	defer q.Close()
	v, err := q.Exec(context.WithoutCancel(t.Context())).Vector()
	must(t, err)
	return v
}

// Querier implements storage.Queryable.
func (s *series) Querier(_, maxt int64) (storage.Querier, error) {
	return &storage.MockQuerier{SelectMockFunction: func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
		found := &seriesSet{}
		for _, o := range s.all {
			if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(o.labels.Get(m.Name)) }) {
				found.rest = append(found.rest, storage.NewListSeries(o.labels, o.samples))
			}
		}
		return found
	}}, nil
}

// seriesSet implements storage.SeriesSet.
type seriesSet struct {
	at   storage.Series
	rest []storage.Series
}

func (s *seriesSet) Next() bool {
	if len(s.rest) == 0 {
		return false
	}
	s.at, s.rest = s.rest[0], s.rest[1:]
	return true
}

func (s *seriesSet) At() storage.Series                { return s.at }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }

func same(t *testing.T, what string, got, want []string) {
	t.Helper()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
