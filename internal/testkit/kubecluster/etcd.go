package kubecluster

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3" //nolint:depguard // the etcd of a cluster that is not ours
	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// connectEtcd makes a client of the cluster's etcd.
func (c *Cluster) connectEtcd() (err error) {
	if c.etcd, err = clientv3.New(clientv3.Config{Endpoints: []string{c.etcdURL}, DialTimeout: startTime, Logger: zap.NewNop()}); err != nil {
		return fmt.Errorf("connect to etcd: %w", err)
	}
	c.undo.add(c.etcd.Close)
	return nil
}

// FollowStored calls saw for each write of an object of a CRD's kind since the call, in order and without a gap, until
// the test ends. It reads etcd, so no state of the API server or of its connections hides a write. key ends with
// namespace and name; object is JSON, and nil for a deletion.
func (c *Cluster) FollowStored(t testing.TB, of schema.GroupResource, saw func(key string, object []byte)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	writes := c.etcd.Watch(clientv3.WithRequireLeader(ctx), "/registry/"+of.Group+"/"+of.Resource+"/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if first := <-writes; !first.Created {
		cancel()
		t.Fatalf("watch etcd: %v", first.Err())
	}
	var running sync.WaitGroup
	running.Go(func() {
		for some := range writes {
			if err := some.Err(); err != nil && ctx.Err() == nil {
				t.Errorf("watch etcd: %v", err)
			}
			for _, e := range some.Events {
				object := e.Kv.Value
				if e.Type == clientv3.EventTypeDelete {
					object = nil
				}
				saw(string(e.Kv.Key), object)
			}
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

// RestartServer kills the API server, deletes the history of etcd, and starts the API server again. It cuts all connections, and
// clients that continue a watch get 410 Gone. It returns when the server is ready; before that the server answers with 403, because it does not know the
// rights of all accounts yet.
func (c *Cluster) RestartServer(t testing.TB) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	c.restarted.Store(true)
	c.restarting.Store(true)
	defer c.restarting.Store(false)
	i := slices.IndexFunc(c.programs, func(p *program) bool { return p.name == apiServer })
	if err := c.programs[i].kill(); err != nil {
		t.Fatal(err)
	}
	c.programs = slices.Delete(c.programs, i, i+1)
	now, err := c.etcd.Get(ctx, "/")
	if err == nil {
		_, err = c.etcd.Compact(ctx, now.Header.Revision)
	}
	if err == nil {
		err = c.runServer(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Restarting reports whether [Cluster.RestartServer] runs.
func (c *Cluster) Restarting() bool { return c.restarting.Load() }

// Restarted reports whether the API server has been restarted.
func (c *Cluster) Restarted() bool { return c.restarted.Load() }
