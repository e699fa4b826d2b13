package etcd

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// ownerKey is below the prefix; no kind is stored there.
	ownerKey     = "/server"
	instanceFile = "instance"
	// instanceLength is less than what rand.Text returns.
	instanceLength = 20
	// minLease leaves time for a late check: etcd's client renews after a third of the length and up to
	// half a second, etcd tells whole seconds, and the server gives up a third before the end.
	minLease = 10 * time.Second
	// checks is the number of checks of the lease within its length. The last third of the
	// length is for the server to stop.
	checks = 10
)

// errOwnerLost means that this server may no longer act on the objects in etcd.
var errOwnerLost = errors.New("lease lost")

// owner is the value of the owner key: the server that acts on the objects below a prefix.
type owner struct {
	Instance string    `json:"instance"` // of the data directory
	Node     string    `json:"node"`
	PID      int       `json:"pid"`
	Since    time.Time `json:"since"`
}

// ownership is a held owner key. etcd deletes the key when the lease ends.
//
// The concurrency package of etcd's client is not used. Its Session reports the end of a lease by
// the time of the last response, when etcd may have admitted another server already; its
// Mutex waits for the holder and does not name it.
type ownership struct {
	etcd    *clientv3.Client
	key     string
	lease   clientv3.LeaseID
	length  time.Duration
	written int64     // revision of the key
	until   time.Time // etcd excludes other servers at least until then
	stop    context.CancelFunc
	done    chan struct{}
	lost    error // set before done is closed; nil: it was released
}

// takeOwnership makes this server the one that acts on the objects below the prefix, or returns
// an errs.ErrConflict that names the other server. A killed server takes its key back at once.
// The lease is renewed until release.
func takeOwnership(ctx context.Context, c *clientv3.Client, cfg *Config, dir string, log *slog.Logger) (*ownership, error) {
	instance, err := instanceID(dir)
	if err != nil {
		return nil, err
	}
	value, err := json.Marshal(owner{Instance: instance, Node: cfg.NodeName, PID: os.Getpid(), Since: time.Now().UTC().Truncate(time.Second)})
	if err != nil {
		return nil, err
	}
	o := &ownership{etcd: c, key: cfg.Prefix + ownerKey, length: cfg.Lease, until: time.Now().Add(cfg.Lease), done: make(chan struct{})}
	granted, err := c.Grant(ctx, int64(cfg.Lease/time.Second))
	if err != nil {
		return nil, unreachable(cfg, err)
	}
	o.lease = granted.ID
	if err := o.take(ctx, cfg, instance, string(value)); err != nil {
		o.revoke(ctx)
		return nil, err
	}
	ctx, o.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(o.done)
		o.lost = o.keep(ctx, log)
	}()
	return o, nil
}

// await returns an errOwnerLost when this server may no longer act on the objects, nil once ctx is
// done or the key is released.
func (o *ownership) await(ctx context.Context) error {
	select {
	case <-o.done:
		return o.lost
	case <-ctx.Done():
		return nil
	}
}

// take writes the key unless another instance has written it.
func (o *ownership) take(ctx context.Context, cfg *Config, instance, value string) error {
	got, err := o.etcd.Get(ctx, o.key)
	if err != nil {
		return unreachable(cfg, err)
	}
	var held int64 // revision of the key; 0: there is none
	if len(got.Kvs) > 0 {
		var by owner
		if err := json.Unmarshal(got.Kvs[0].Value, &by); err != nil {
			return fmt.Errorf("etcd key %s: %w: is not a server's: %w; choose another etcdPrefix", o.key, errs.ErrConflict, err)
		}
		if by.Instance != instance || by.Node != cfg.NodeName { // a copied data directory is another server's
			return o.heldBy(cfg, &by)
		}
		held = got.Kvs[0].ModRevision
	}
	put, err := o.etcd.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(o.key), "=", held)).
		Then(clientv3.OpPut(o.key, value, clientv3.WithLease(o.lease))).Commit()
	switch {
	case err != nil:
		return unreachable(cfg, err)
	case !put.Succeeded:
		return fmt.Errorf("etcd prefix %s: %w: another server took it at this moment; stop one of them, or set etcdPrefix", cfg.Prefix, errs.ErrConflict)
	}
	o.written = put.Header.Revision
	return nil
}

func (o *ownership) heldBy(cfg *Config, by *owner) error {
	return fmt.Errorf("etcd prefix %s: %w: in use by the server on node %s (process %d, since %s); stop that server, or set another etcdPrefix; after a crash there the prefix is free within %s",
		cfg.Prefix, errs.ErrConflict, by.Node, by.PID, by.Since.Format(time.RFC3339), cfg.Lease)
}

func unreachable(cfg *Config, err error) error {
	return fmt.Errorf("reach etcd at %v: %w: %w", cfg.Endpoints, errs.ErrUnavailable, err)
}

// keep renews the lease until ctx is done. It returns an errOwnerLost while etcd still excludes
// others, unless etcd itself has deleted the key.
func (o *ownership) keep(ctx context.Context, log *slog.Logger) error {
	alive, err := o.etcd.KeepAlive(ctx, o.lease)
	if err != nil {
		return fmt.Errorf("renew etcd lease: %w", err)
	}
	tick := time.NewTicker(o.length / checks)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-alive:
			if !open {
				alive = nil // the next check reads the lease from etcd
			}
			continue
		case <-tick.C:
		}
		err := o.check(ctx)
		switch {
		case err == nil, ctx.Err() != nil:
		case errors.Is(err, errOwnerLost), !time.Now().Before(o.giveUp()):
			o.lease = clientv3.NoLease // a stop that waits for etcd could outlast it
			return fmt.Errorf("%w: another server may use etcd prefix %s; this one stops, its sandboxes keep running: %w",
				errOwnerLost, strings.TrimSuffix(o.key, ownerKey), err)
		default:
			log.WarnContext(ctx, "etcd lease not verified", telemetry.Error, err)
		}
	}
}

// giveUp is when this server begins to stop, so that it has ended when etcd admits another.
func (o *ownership) giveUp() time.Time { return o.until.Add(-o.length / 3) }

// check reads from etcd how long the lease lasts, and whether the key is still this server's.
func (o *ownership) check(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, o.giveUp())
	defer cancel()
	begin := time.Now()
	left, err := o.etcd.TimeToLive(ctx, o.lease)
	if err != nil {
		return err
	}
	got, err := o.etcd.Get(ctx, o.key)
	switch {
	case err != nil:
		return err
	case left.TTL <= 0:
		return fmt.Errorf("%w: it has ended", errOwnerLost)
	case len(got.Kvs) == 0 || got.Kvs[0].ModRevision != o.written:
		return fmt.Errorf("%w: its key was changed", errOwnerLost)
	}
	o.until = begin.Add(time.Duration(left.TTL) * time.Second)
	return nil
}

// release admits another server at once; if etcd does not answer, it does so when the lease ends.
func (o *ownership) release(ctx context.Context) {
	o.stop()
	<-o.done
	o.revoke(ctx)
}

func (o *ownership) revoke(ctx context.Context) {
	if o.lease == clientv3.NoLease {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
	defer cancel()
	_, _ = o.etcd.Revoke(ctx, o.lease)
}

// instanceID identifies a server; it belongs to the data directory.
func instanceID(dir string) (string, error) {
	path := filepath.Join(dir, instanceFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		id := rand.Text()
		return id, durable.WriteFile(path, []byte(id), 0o600)
	}
	if err != nil {
		return "", fmt.Errorf("read instance ID: %w", err)
	}
	if len(text) < instanceLength {
		return "", fmt.Errorf("instance ID in %s: %w: it is too short; remove the file, a new one is made", path, errs.ErrInvalid)
	}
	return string(text), nil
}
