package events

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/sets"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// gather is how long changes are gathered for one transaction, so that its syncs seldom meet those of etcd on the same disk. A
	// crash meanwhile loses nothing: the next process compares.
	gather = 100 * time.Millisecond
	// retryAfter is the wait after a transaction that failed, as on a full disk.
	retryAfter = time.Second
	// compareEvery is how often all objects are compared with the database.
	compareEvery = time.Hour
	// maxQueue bounds the changes that wait while the disk fails. Beyond it all objects are compared with the database.
	maxQueue = 20_000
)

// Objects lists what the cache has of all namespaces, once it has all.
type Objects interface {
	Sandboxes(ctx context.Context, namespace string) ([]*agents.Sandbox, error)
	Checkpoints(ctx context.Context, namespace string) ([]barchan.Checkpoint, error)
}

// Config configures a Recorder. Every field is required.
type Config struct {
	Store   *Store
	Objects Objects
	Log     *slog.Logger
	// SizeOf returns what a sandbox may use.
	SizeOf func(*agents.Sandbox) Size
	// Gone reports whether the API server has no namespace of a name. Its log is removed.
	Gone func(ctx context.Context, namespace string) (bool, error)
	// Recorded is called after events are on the disk. It must not block.
	Recorded func()
}

// Recorder writes the events of all sandboxes. Observing costs no more than an entry of a queue, so that a claim does not wait
// for the disk.
type Recorder struct {
	cfg  Config
	wake chan struct{}

	mu    sync.Mutex
	queue []change // +checklocks:mu
	// compare: all objects must be compared.
	compare bool // +checklocks:mu

	// compared has the versions of objects that compareAll has seen before their changes left the queue; empty: it was gone.
	// Run's alone.
	compared map[types.UID]string
}

// change is one of an object, of which the UID alone is left after its deletion.
type change struct {
	uid        types.UID
	sandbox    *agents.Sandbox
	checkpoint *barchan.Checkpoint
	at         time.Time
}

// NewRecorder checks the configuration.
func NewRecorder(cfg Config) (*Recorder, error) {
	if cfg.Store == nil || cfg.Objects == nil || cfg.Log == nil || cfg.SizeOf == nil || cfg.Gone == nil || cfg.Recorded == nil {
		return nil, fmt.Errorf("events: a required part is missing: %w", errs.ErrInvalid)
	}
	return &Recorder{cfg: cfg, wake: make(chan struct{}, 1), compare: true, compared: map[types.UID]string{}}, nil
}

// Observe takes each change of a sandbox in the order of the watch; newer is nil for a deleted one.
func (r *Recorder) Observe(older, newer *agents.Sandbox) {
	if newer == nil {
		r.add(change{uid: older.UID, at: time.Now()})
		return
	}
	r.add(change{uid: newer.UID, sandbox: newer, at: time.Now()})
}

// ObserveCheckpoint takes each change of a checkpoint.
func (r *Recorder) ObserveCheckpoint(_, newer *barchan.Checkpoint) {
	if newer != nil && newer.Status.Phase == barchan.CheckpointReady && newer.Labels[barchan.LabelPurpose] == "" {
		r.add(change{uid: newer.UID, checkpoint: newer, at: time.Now()})
	}
}

func (r *Recorder) add(c change) {
	r.mu.Lock()
	if r.queue = append(r.queue, c); len(r.queue) > maxQueue {
		r.queue, r.compare = nil, true
	}
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run writes events until ctx is done, and then those that it has observed. The cache must be complete.
func (r *Recorder) Run(ctx context.Context) error {
	tick := time.NewTicker(compareEvery)
	defer tick.Stop()
	for {
		if err := r.flush(ctx); err != nil {
			r.cfg.Log.WarnContext(ctx, "events not recorded", telemetry.Error, err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(retryAfter):
				continue
			}
		}
		select {
		case <-ctx.Done():
			if err := r.flush(context.WithoutCancel(ctx)); err != nil { // the next process compares
				r.cfg.Log.WarnContext(ctx, "events not recorded", telemetry.Error, err)
			}
			return nil
		case <-r.wake:
			select {
			case <-ctx.Done():
			case <-time.After(gather):
			}
		case <-tick.C:
			r.mu.Lock()
			r.compare = true
			r.mu.Unlock()
			if err := r.removeGone(ctx); err != nil {
				r.cfg.Log.WarnContext(ctx, "events of deleted namespaces not removed", telemetry.Error, err)
			}
		}
	}
}

// removeGone removes the logs of namespaces that are deleted.
func (r *Recorder) removeGone(ctx context.Context) error {
	names, err := r.cfg.Store.namespaces()
	if err != nil {
		return err
	}
	for _, name := range names {
		gone, err := r.cfg.Gone(ctx, name)
		if err == nil && gone {
			err = r.cfg.Store.remove(name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// flush writes all that waits, in one transaction.
func (r *Recorder) flush(ctx context.Context) error {
	r.mu.Lock()
	batch, compare := r.queue, r.compare
	r.queue, r.compare = nil, false
	r.mu.Unlock()
	if len(batch) == 0 && !compare {
		return nil
	}
	var recorded int
	err := r.cfg.Store.db.Update(func(tx *bolt.Tx) (err error) {
		for _, c := range batch {
			if err := r.record(tx, c, &recorded); err != nil {
				return err
			}
		}
		if compare {
			return r.compareAll(ctx, tx, &recorded)
		}
		return nil
	})
	if err != nil {
		r.mu.Lock()
		r.queue, r.compare = append(batch, r.queue...), r.compare || compare
		r.mu.Unlock()
		return err
	}
	if recorded > 0 {
		failpoint.Reach("event/recorded")
		r.cfg.Recorded()
	}
	return nil
}

// record writes the events of a change, and the state that they leave.
func (r *Recorder) record(tx *bolt.Tx, c change, recorded *int) error {
	if c.checkpoint != nil {
		return r.recordCheckpoint(tx, c, recorded)
	}
	states := tx.Bucket(bucketSandboxes)
	was, err := stateOf(states, c.uid)
	if err != nil {
		return err
	}
	var now *state
	switch {
	case r.outdated(c):
		return nil
	case c.sandbox == nil || sandbox.DeadForGood(c.sandbox):
	case was != nil || shown(c.sandbox):
		now = new(r.observed(c.sandbox, was))
	}
	version := ""
	if c.sandbox != nil {
		version = c.sandbox.ResourceVersion
	}
	for _, e := range between(c.uid, version, was, now, c.at) {
		if err := r.cfg.Store.add(tx, &e); err != nil {
			return err
		}
		*recorded++
	}
	if now == nil {
		return states.Delete([]byte(c.uid))
	}
	text, err := json.Marshal(now)
	if err != nil {
		return err
	}
	if string(text) == string(states.Get([]byte(c.uid))) {
		return nil
	}
	return states.Put([]byte(c.uid), text)
}

// outdated reports whether a change is older than what compareAll has seen.
func (r *Recorder) outdated(c change) bool {
	seen, ok := r.compared[c.uid]
	if !ok || c.sandbox != nil && seen == "" {
		return ok
	}
	if c.sandbox != nil {
		if n, err := resourceversion.CompareResourceVersion(c.sandbox.ResourceVersion, seen); err == nil && n < 0 {
			return true
		}
	}
	delete(r.compared, c.uid)
	return false
}

func stateOf(states *bolt.Bucket, uid types.UID) (*state, error) {
	text := states.Get([]byte(uid))
	if text == nil {
		return nil, nil
	}
	s := &state{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, fmt.Errorf("decode the state of sandbox %s: %w", sandbox.IDOf(uid), err)
	}
	return s, nil
}

// recordCheckpoint records a checkpoint once.
func (r *Recorder) recordCheckpoint(tx *bolt.Tx, c change, recorded *int) error {
	done := tx.Bucket(bucketCheckpoints)
	if done.Get([]byte(c.uid)) != nil {
		return nil
	}
	var source types.UID
	if from := c.checkpoint.Status.Source; from != nil {
		source = from.UID
	}
	of, err := stateOf(tx.Bucket(bucketSandboxes), source)
	if err != nil {
		return err
	}
	if of == nil {
		of = &state{Namespace: c.checkpoint.Namespace}
	}
	e := of.event(source, Checkpointed, c.at)
	e.ID, e.Data.SnapshotID = idOf(string(c.uid)), c.checkpoint.SnapshotID()
	if err := r.cfg.Store.add(tx, &e); err != nil {
		return err
	}
	*recorded++
	return done.Put([]byte(c.uid), []byte{1})
}

// compareAll records what this process has not observed, as what happened before it ran.
func (r *Recorder) compareAll(ctx context.Context, tx *bolt.Tx, recorded *int) error {
	boxes, err := r.cfg.Objects.Sandboxes(ctx, "")
	if err != nil {
		return err
	}
	checkpoints, err := r.cfg.Objects.Checkpoints(ctx, "")
	if err != nil {
		return err
	}
	have := sets.New[types.UID]()
	for _, s := range boxes {
		have.Insert(s.UID)
		if err := r.record(tx, change{uid: s.UID, sandbox: s, at: time.Now()}, recorded); err != nil {
			return err
		}
		r.compared[s.UID] = s.ResourceVersion
	}
	var gone []types.UID
	err = tx.Bucket(bucketSandboxes).ForEach(func(k, _ []byte) error {
		if !have.Has(types.UID(k)) {
			gone = append(gone, types.UID(k))
		}
		return nil
	})
	for _, uid := range gone {
		if err == nil {
			err = r.record(tx, change{uid: uid, at: time.Now()}, recorded)
			r.compared[uid] = ""
		}
	}
	if err != nil {
		return err
	}
	kept := sets.New[types.UID]()
	for i := range checkpoints {
		kept.Insert(checkpoints[i].UID)
		if c := &checkpoints[i]; c.Status.Phase == barchan.CheckpointReady && c.Labels[barchan.LabelPurpose] == "" {
			if err := r.record(tx, change{uid: c.UID, checkpoint: c, at: barchan.CreatedAt(c)}, recorded); err != nil {
				return err
			}
		}
	}
	return sweep(tx.Bucket(bucketCheckpoints), kept.Has)
}
