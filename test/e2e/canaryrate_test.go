package e2e

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

var canaryRestores = flag.Int("canary-restores", 0, "how often TestCanaryRestores restores each canary; 0 skips it")

// canaryMargin is what the end of TestCanaryRestores may take before -timeout ends it.
const canaryMargin = 2 * time.Minute

// TestCanaryRestores restores canaries again and again, each as often as -canary-restores says or until -timeout, and reports the rate
// of failures. A canary that failed is not restored again, since it may differ from then on.
func TestCanaryRestores(t *testing.T) {
	if *canaryRestores == 0 {
		t.Skip("it takes hours: make canaries runs it")
	}
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", "1ms")
	s.set("BARCHAN_QUOTA_SANDBOXES", "0")
	s.set("BARCHAN_QUOTA_CREATES", "0")
	s.start()
	s.must("image", "build", "base")
	s.apply(runtimeTemplate("roomy", "gvisor", "1536Mi"))
	var live []*restored
	for _, c := range canaries(t) {
		x := &restored{canary: c}
		x.id, x.answer = s.hatch(c)
		live = append(live, x)
	}
	end, ok := t.Deadline()
	if !ok {
		end = time.Now().Add(24 * time.Hour)
	}
	key, began := s.localKey(), time.Now()
	round := 0
	for ; round < *canaryRestores && time.Until(end) > canaryMargin; round++ {
		var wg sync.WaitGroup
		jobs := make(chan *restored)
		for range 2 {
			wg.Go(func() {
				for x := range jobs {
					x.restore(s, key)
				}
			})
		}
		for _, x := range live {
			if x.err == nil && time.Until(end) > canaryMargin {
				jobs <- x
			}
		}
		close(jobs)
		wg.Wait()
		if time.Until(end) <= canaryMargin {
			break // within the round
		}
		if round%50 == 49 {
			t.Logf("%d rounds in %v", round+1, time.Since(began).Round(time.Second))
		}
	}
	all, failed := 0, 0
	for _, x := range live {
		all += x.restores
		if x.err != nil {
			failed++
			t.Errorf("%s: restore %d: %v\n%s", x.name, x.restores, x.err, s.tail())
		}
	}
	t.Logf("%d canaries, %d rounds, %d restores in %v: %d failed; the rate is below %.2g %% of restores, and of those of one canary below %.2g %%, with 95 %% confidence",
		len(live), round, all, time.Since(began).Round(time.Second), failed, 100*upperBound(failed, all), 100*upperBound(0, round))
	s.must(append([]string{"kill"}, s.allIDs()...)...)
	eventually.NoError(t, "nothing is left", s.onlyLive)
}

// restored is a canary that is restored again and again.
type restored struct {
	canary
	id, answer string
	restores   int
	err        error // of the last restore
}

// restore has the canary sleep on disk and go on. It may be called by any goroutine.
func (x *restored) restore(s *server, key string) {
	x.restores++
	x.err = errors.Join(
		x.call(s, key, "pause", nil),
		within("processes end", func() error {
			if n := s.processesOf(x.id); n > 0 {
				return fmt.Errorf("%d processes", n)
			}
			return nil
		}))
	if x.err != nil {
		return
	}
	if x.err = x.call(s, key, "connect", map[string]int{"timeout": 24 * 60 * 60}); x.err != nil {
		return
	}
	before := x.answer
	if x.answer, x.err = s.visitCanary(x.id); x.err != nil {
		return
	}
	if x.err = x.compare(before, x.answer); x.err != nil || !x.grows {
		return
	}
	x.err = within("it counts", func() error {
		later, err := s.visitCanary(x.id)
		if err == nil && later == x.answer {
			err = errors.New(later)
		}
		return err
	})
}

func (x *restored) call(s *server, key, verb string, body any) error {
	status, text, err := s.tryCall(key, http.MethodPost, "/sandboxes/"+x.id+"/"+verb, body)
	if err == nil && status/100 != 2 {
		err = fmt.Errorf("%s: %d %s", verb, status, text)
	}
	return err
}

// visitCanary returns what a canary answers, once its port can be reached. It may be called by any goroutine.
func (s *server) visitCanary(id string) (answer string, err error) {
	var status int
	err = within("its port can be reached", func() (err error) {
		status, answer, err = s.visit(id, 8080, "/")
		if err == nil && status == http.StatusBadGateway {
			err = errors.New(answer)
		}
		return err
	})
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%d %s", status, answer)
	}
	return answer, err
}

// within is eventually.NoError for any goroutine.
func within(what string, check func() error) error {
	for end := time.Now().Add(eventually.Patience); ; time.Sleep(5 * time.Millisecond) {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: not within %v (last error: %w)", what, eventually.Patience, err)
		}
	}
}

// upperBound is the least rate that so few failures of n tries exclude with 95 % confidence: 3/n for none.
func upperBound(failed, n int) float64 {
	low, high := 0.0, float64(failed)*2+20 // expected failures
	for range 60 {
		expected := (low + high) / 2
		term := math.Exp(-expected)
		sum := term
		for i := 1; i <= failed; i++ {
			term *= expected / float64(i)
			sum += term
		}
		if sum > 0.05 {
			low = expected
		} else {
			high = expected
		}
	}
	return high / float64(n)
}

func TestUpperBound(t *testing.T) {
	for failed, want := range map[int]float64{0: 2.996, 1: 4.744, 5: 10.513} { // quantiles of Poisson's distribution
		if got := 1000 * upperBound(failed, 1000); math.Abs(got-want) > 0.001 {
			t.Errorf("%d failures: %.3f, want %.3f", failed, got, want)
		}
	}
}
