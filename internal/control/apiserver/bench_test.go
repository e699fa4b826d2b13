package apiserver_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// timed runs f b.N times from workers goroutines and reports percentiles beside the mean.
func timed(b *testing.B, workers int, f func(i int) error) {
	b.Helper()
	took := make([]time.Duration, b.N)
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ResetTimer()
	for range workers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < b.N; i = int(next.Add(1)) - 1 {
				begin := time.Now()
				if err := f(i); err != nil {
					b.Error(err)
					return
				}
				took[i] = time.Since(begin)
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	slices.Sort(took)
	at := func(p float64) float64 { return float64(took[int(float64(len(took)-1)*p)].Microseconds()) }
	b.ReportMetric(at(0.5), "p50-µs")
	b.ReportMetric(at(0.99), "p99-µs")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}

// BenchmarkAPI measures a sandbox's writes and reads through the API beside a bare etcd
// transaction of about the same size, on the same disk in the same run.
func BenchmarkAPI(b *testing.B) {
	b.Run("floor", benchmarkFloor)
	s := start(b, func(c *apiserver.Config) { c.Listen = "" })
	c := clientAs(b, s, apiserver.UserController)
	var round atomic.Int64
	name := func() string { return fmt.Sprintf("r%d", round.Add(1)) }
	for _, workers := range []int{1, 16} {
		b.Run(fmt.Sprintf("create/%d", workers), func(b *testing.B) {
			prefix := name()
			timed(b, workers, func(i int) error { return c.Create(b.Context(), sandbox(fmt.Sprintf("%s-%d", prefix, i))) })
		})
		b.Run(fmt.Sprintf("update/%d", workers), func(b *testing.B) { benchmarkUpdate(b, c, name(), workers) })
	}
	d := s.Direct(apiserver.UserController)
	for _, workers := range []int{1, 16} {
		b.Run(fmt.Sprintf("update/direct/%d", workers), func(b *testing.B) { benchmarkUpdate(b, d, name(), workers) })
	}
	b.Run("get/direct", func(b *testing.B) {
		sb := sandbox(name())
		create(b, c, sb)
		timed(b, 1, func(int) error { return d.Get(b.Context(), client.ObjectKeyFromObject(sb), &agents.Sandbox{}) })
	})
	target := sandbox("target")
	create(b, c, target)
	b.Run("get", func(b *testing.B) {
		timed(b, 1, func(int) error { return c.Get(b.Context(), client.ObjectKeyFromObject(target), &agents.Sandbox{}) })
	})
	b.Run("status", func(b *testing.B) {
		if err := c.Get(b.Context(), client.ObjectKeyFromObject(target), target); err != nil {
			b.Fatal(err)
		}
		timed(b, 1, func(i int) error {
			target.Status.NodeName = fmt.Sprint(i)
			return c.Status().Update(b.Context(), target)
		})
	})
	b.Run("write-to-watch", func(b *testing.B) { benchmarkWatch(b, c, target, name()) })
}

// benchmarkFloor is what the same would cost on etcd alone.
func benchmarkFloor(b *testing.B) {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.ZapLoggerBuilder = b.TempDir(), embed.NewZapLoggerBuilder(zap.NewNop())
	u := url.URL{Scheme: "unix", Path: "/bench"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = nil, []url.URL{u}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = nil, []url.URL{u}
	cfg.InitialCluster = cfg.Name + "=" + u.String()
	cfg.TickMs, cfg.ElectionMs = 10, 50
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	<-e.Server.ReadyNotify()
	c := v3client.New(e.Server)
	value := string(make([]byte, 1024))
	var next atomic.Int64
	for _, workers := range []int{1, 16} {
		b.Run(fmt.Sprintf("create/%d", workers), func(b *testing.B) {
			timed(b, workers, func(int) error {
				key := fmt.Sprintf("/floor/%d", next.Add(1))
				_, err := c.Txn(b.Context()).If(clientv3.Compare(clientv3.ModRevision(key), "=", 0)).Then(clientv3.OpPut(key, value)).Commit()
				return err
			})
		})
	}
	b.Run("get", func(b *testing.B) {
		timed(b, 1, func(int) error {
			res, err := c.Get(b.Context(), "/floor/1")
			if err == nil && res.Count != 1 {
				err = fmt.Errorf("%d values", res.Count)
			}
			return err
		})
	})
}

// writer is what requests and direct calls have in common.
type writer interface {
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
}

// benchmarkUpdate has each worker change a sandbox of its own, as a claim does.
func benchmarkUpdate(b *testing.B, c writer, prefix string, workers int) {
	free := make(chan *agents.Sandbox, workers)
	for i := range workers {
		sb := sandbox(fmt.Sprintf("%s-%d", prefix, i))
		if err := c.Create(b.Context(), sb); err != nil {
			b.Fatal(err)
		}
		free <- sb
	}
	timed(b, workers, func(i int) error {
		sb := <-free
		defer func() { free <- sb }()
		sb.Labels = map[string]string{agents.LabelClaimUID: fmt.Sprint(i)}
		return c.Update(b.Context(), sb)
	})
}

// benchmarkWatch measures from the start of a write to its event.
func benchmarkWatch(b *testing.B, c client.WithWatch, target *agents.Sandbox, round string) {
	w, err := c.Watch(b.Context(), &agents.SandboxList{}, client.InNamespace("default"), client.MatchingFields{"metadata.name": target.Name})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Stop()
	<-w.ResultChan() // what was there
	timed(b, 1, func(i int) error {
		target.Labels = map[string]string{"i": fmt.Sprintf("%s-%d", round, i)} // a change, or there is no event
		if err := c.Update(b.Context(), target); err != nil {
			return err
		}
		for e := range w.ResultChan() {
			if sb, ok := e.Object.(*agents.Sandbox); ok && sb.ResourceVersion == target.ResourceVersion {
				return nil
			}
		}
		return fmt.Errorf("the watch ended")
	})
}

// BenchmarkStart measures from nothing to a server that answers, over a directory with data.
func BenchmarkStart(b *testing.B) {
	dir := b.TempDir()
	for b.Loop() {
		s := newServer(b, func(c *apiserver.Config) { c.DataDir = dir })
		if err := s.Start(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		s.Stop()
		b.StartTimer()
	}
}
