package bench

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// counts are numbers by name. Those of requests are by verb, resource and refusal, such as "PATCH sandboxes/status" and "POST pods: 409".
type counts map[string]float64

var (
	writeVerbs = []string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
	readVerbs  = []string{"GET", "LIST"}
)

// writes reads how many requests kube-apiserver has served that write, refused ones too.
func (l *load) writes() counts { return l.requests(writeVerbs) }

// requests reads how many requests of these verbs kube-apiserver has served, refused ones too.
func (l *load) requests(verbs []string) counts {
	l.Helper()
	text, err := l.cluster.Client.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(context.WithoutCancel(l.Context()))
	must(l, err)
	w, err := parseRequests(text, verbs)
	must(l, err)
	return w
}

// ignored are the resources that nodes and control planes write to for as long as they live, and reviews, which change nothing.
var ignored = []string{"leases", "nodes", "tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews"}

func parseMetrics(text []byte) (map[string]*dto.MetricFamily, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	return parser.TextToMetricFamilies(bytes.NewReader(text))
}

// parseRequests counts those of some verbs in the text of /metrics.
func parseRequests(text []byte, verbs []string) (counts, error) {
	families, err := parseMetrics(text)
	if err != nil {
		return nil, err
	}
	counted := counts{}
	for _, m := range families["apiserver_request_total"].GetMetric() {
		verb, resource := label(m, "verb"), label(m, "resource")
		if !slices.Contains(verbs, verb) || resource == "" || slices.Contains(ignored, resource) {
			continue
		}
		if sub := label(m, "subresource"); sub != "" {
			resource += "/" + sub
		}
		if code := label(m, "code"); !strings.HasPrefix(code, "2") {
			resource += ": " + code
		}
		counted[verb+" "+resource] += m.GetCounter().GetValue()
	}
	return counted, nil
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

func (w counts) total() (sum float64) {
	for n := range maps.Values(w) {
		sum += n
	}
	return sum
}

// refused counts the writes that were refused with 409, but those by kube-controller-manager's disruption controller.
func (w counts) refused() (sum float64) {
	for key, n := range w {
		if strings.HasSuffix(key, ": 409") && !strings.Contains(key, " poddisruptionbudgets/status") {
			sum += n
		}
	}
	return sum
}

// since returns what was added.
func (w counts) since(before counts) counts {
	added := counts{}
	for key, n := range w {
		if n != before[key] {
			added[key] = n - before[key]
		}
	}
	return added
}

// per divides by a number of claims.
func (w counts) per(claims int) counts {
	each := counts{}
	for key, n := range w {
		each[key] = n / float64(claims)
	}
	return each
}
