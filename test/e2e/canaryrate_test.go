package e2e

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

var canaryRestores = flag.Int("canary-restores", 0, "how often TestCanaryRestores restores each canary; 0 skips the test")

// canaryMargin is what the end of TestCanaryRestores may take before -timeout ends it.
const canaryMargin = 2 * time.Minute

// TestCanaryRestores restores all canaries again and again, as often as -canary-restores says or until -timeout, and reports the rate of
// failures. All are in one sandbox, so that each restore is one of each of them; a second sandbox is beside it. A sandbox in which one
// failed is not restored again, since it may differ from then on.
func TestCanaryRestores(t *testing.T) {
	if *canaryRestores == 0 {
		t.Skip("it takes an hour: make canaries runs it")
	}
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", "1ms")
	s.set("BARCHAN_QUOTA_CREATES", "0")
	s.start()
	s.must("image", "build", "base")
	s.apply(strings.Replace(runtimeTemplate("roomy", "gvisor", "1536Mi"), "cpu: 500m", "cpu: 2", 1))
	all := canaries(t)
	live := []*restored{s.hatchAll(all), s.hatchAll(all)}
	end, ok := t.Deadline()
	if !ok {
		end = time.Now().Add(24 * time.Hour)
	}
	key, began := s.localKey(), time.Now()
	var total atomic.Int64
	var wg sync.WaitGroup
	for _, x := range live {
		wg.Go(func() {
			for x.err == nil && time.Until(end) > canaryMargin {
				n := total.Add(1)
				if n > int64(*canaryRestores) {
					return
				}
				if x.err = x.restore(s, key); x.err != nil {
					x.err = fmt.Errorf("restore %d: %w", x.restores, x.err)
				}
				if n%100 == 0 {
					t.Logf("%d restores in %v", n, time.Since(began).Round(time.Second))
				}
			}
		})
	}
	wg.Wait()
	restores, failed := 0, 0
	for _, x := range live {
		restores += x.restores
		if x.err != nil {
			failed++
			t.Errorf("%s: %v\n%s", x.id, x.err, s.tail())
		}
	}
	t.Logf("each of %d canaries was restored %d times in %v: %d failed; the rate is below %.2g %% with 95 %% confidence",
		len(all), restores, time.Since(began).Round(time.Second), failed, 100*upperBound(failed, restores))
	s.must(append([]string{"kill"}, s.allIDs()...)...)
	eventually.NoError(t, "nothing is left", s.onlyLive)
}

// restored is a sandbox that is restored again and again.
type restored struct {
	id       string
	canaries []canary
	answers  []string // of canaries
	restores int
	err      error // of the last restore
}

// hatchAll starts canaries in one sandbox, at the ports from witnessPort on.
func (s *server) hatchAll(all []canary) *restored {
	x := &restored{id: s.canarySandbox(all...), canaries: slices.Clone(all)}
	for i := range x.canaries {
		c := &x.canaries[i]
		c.start = "export MIB=32\n" + c.start // of the memory that is checked; TestCanaries has more
		x.answers = append(x.answers, s.startCanary(*c, x.id, witnessPort+i))
	}
	return x
}

// restore has the sandbox sleep on disk and go on, and asks all canaries. It may be called by any goroutine, by one at a time.
func (x *restored) restore(s *server, key string) error {
	x.restores++
	if err := x.call(s, key, "pause", nil); err != nil {
		return err
	}
	if err := within("processes end", func() error {
		if n := s.processesOf(x.id); n > 0 {
			return fmt.Errorf("%d processes", n)
		}
		return nil
	}); err != nil {
		return err
	}
	if err := x.call(s, key, "connect", map[string]int{"timeout": 24 * 60 * 60}); err != nil {
		return err
	}
	for i, c := range x.canaries {
		var err error
		if x.answers[i], err = s.askCanary(c, x.id, witnessPort+i, x.answers[i]); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (x *restored) call(s *server, key, verb string, body any) error {
	status, text, err := s.tryCall(key, http.MethodPost, "/sandboxes/"+x.id+"/"+verb, body)
	if err == nil && status/100 != 2 {
		err = fmt.Errorf("%s: %d %s", verb, status, text)
	}
	return err
}

// visitCanary returns what a canary answers, once its port can be reached. It may be called by any goroutine.
func (s *server) visitCanary(id string, port int) (answer string, err error) {
	var status int
	err = within("its port can be reached", func() (err error) {
		status, answer, err = s.visit(id, port, "/")
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
