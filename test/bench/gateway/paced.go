package gateway

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/test/bench/report"
)

// paced sends n requests at a fixed rate over a number of connections, and returns how long each
// took in milliseconds, from when it was due: an answer that is late makes the next ones late, and
// that counts.
func (w *way) paced(ctx context.Context, conns, rate, n int) (report.Samples, error) {
	var mu sync.Mutex
	var all report.Samples
	var first error
	each := time.Duration(conns) * time.Second / time.Duration(rate) // between the requests of one connection
	begin := time.Now().Add(20 * time.Millisecond)
	var wg sync.WaitGroup
	for i := range conns {
		c, err := w.dial(ctx)
		if err != nil {
			return nil, err
		}
		start := begin.Add(each * time.Duration(i) / time.Duration(conns))
		wg.Go(func() {
			defer func() { _ = c.Close() }()
			mine, err := pace(c, w.get("/"), start, each, n/conns)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, mine...)
			if err != nil && first == nil {
				first = err
			}
		})
	}
	wg.Wait()
	return all, first
}

// pace makes n requests on one connection. The first, which opens connections behind it, does not
// count.
func pace(c net.Conn, request []byte, start time.Time, each time.Duration, n int) (report.Samples, error) {
	var took report.Samples
	buf := make([]byte, 4096)
	for i := range n + 1 {
		due := start.Add(each * time.Duration(i))
		time.Sleep(time.Until(due))
		if late := time.Since(due); late > 0 && time.Since(due) < each {
			due = time.Now() // our own timer was late, not the answer before
		}
		if _, err := c.Write(request); err != nil {
			return took, err
		}
		if err := readHello(c, buf); err != nil {
			return took, err
		}
		if i > 0 {
			took = append(took, time.Since(due).Seconds()*1000)
		}
	}
	return took, nil
}
