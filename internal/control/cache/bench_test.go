package cache_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// counter counts reads of single templates.
type counter struct {
	next  http.RoundTripper
	reads *atomic.Int64
}

func (c counter) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/sandboxtemplates/") {
		c.reads.Add(1)
	}
	return c.next.RoundTrip(req)
}

func BenchmarkCurrentTemplate(b *testing.B) {
	var reads atomic.Int64
	cfg := serve(b)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return counter{next, &reads} })
	c, _ := startOn(b, cfg)
	made := template("t", "x")
	if err := c.Live().Create(b.Context(), made); err != nil {
		b.Fatal(err)
	}
	key := client.ObjectKeyFromObject(made)
	for _, callers := range []int{1, 16} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			reads.Store(0)
			b.ReportAllocs()
			var left atomic.Int64
			left.Store(int64(b.N))
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					for left.Add(-1) >= 0 {
						if _, _, err := c.CurrentTemplate(b.Context(), key); err != nil {
							b.Error(err)
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(reads.Load())/float64(b.N), "reads/op")
		})
	}
}

func BenchmarkMembers(b *testing.B) {
	c, _ := start(b)
	made := 0
	for _, size := range []int{100, 1000, 10000} {
		var last *agents.Sandbox
		for ; made < size; made++ {
			last = &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: fmt.Sprintf("m%d", made),
				Labels: map[string]string{agents.LabelWarmPoolSandbox: "p", agents.LabelTemplateHash: "r"},
			}}
			last.Spec.PodTemplate = template("", "x").Spec.PodTemplate
			if err := c.Live().Create(b.Context(), last); err != nil {
				b.Fatal(err)
			}
		}
		if last != nil {
			if _, err := c.WaitSandbox(b.Context(), client.ObjectKeyFromObject(last), there); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprintf("%d", size), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				got, err := c.Members(b.Context(), types.UID("p"))
				if err != nil || len(got) != size {
					b.Fatal(len(got), err)
				}
			}
		})
	}
}
