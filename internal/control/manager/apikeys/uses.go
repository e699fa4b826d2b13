package apikeys

import (
	"context"
	"errors"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

const (
	// usedWithin is how exact the last use of a key is: one write an hour for a key in use.
	usedWithin = time.Hour
	// writeEvery is how often the uses are written.
	writeEvery = time.Minute
)

// uses holds the keys that were used and whose object does not say so yet. The zero value is ready.
type uses struct {
	mu   sync.Mutex
	last map[types.NamespacedName]time.Time // +checklocks:mu
}

// note records a use. It compares two times, unless the key was not used for an hour.
func (u *uses) note(k *barchan.APIKey) {
	now := time.Now()
	if at := k.Status.LastUsedAt; at != nil && now.Sub(at.Time) < usedWithin {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.last == nil {
		u.last = map[types.NamespacedName]time.Time{}
	}
	u.last[client.ObjectKeyFromObject(k)] = now
}

// take returns what was noted, and forgets it.
func (u *uses) take() map[types.NamespacedName]time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	last := u.last
	u.last = nil
	return last
}

// Run writes the last uses of keys now and then, through a client of the API server, until ctx is done.
func (st *Store) Run(ctx context.Context, to client.Client) error {
	return lifecycle.Every(ctx, writeEvery, func() { st.WriteUses(ctx, to) })
}

// WriteUses writes what Run writes. A use that could not be written is lost; the next one is written.
func (st *Store) WriteUses(ctx context.Context, to client.Client) {
	for key, at := range st.uses.take() {
		if err := writeUse(ctx, to, key, at); err != nil && ctx.Err() == nil && !errors.Is(apistatus.Kind(err), errs.ErrNotFound) {
			st.Log.WarnContext(ctx, "last use of API key not written", telemetry.Namespace, key.Namespace, telemetry.Name, key.Name, telemetry.Error, err)
		}
	}
}

func writeUse(ctx context.Context, to client.Client, key types.NamespacedName, at time.Time) error {
	k := &barchan.APIKey{}
	if err := to.Get(ctx, key, k); err != nil {
		return err
	}
	if was := k.Status.LastUsedAt; was != nil && at.Sub(was.Time) < usedWithin { // another replica wrote it
		return nil
	}
	k.Status.LastUsedAt = new(metav1.NewTime(at))
	return to.Status().Update(ctx, k)
}
