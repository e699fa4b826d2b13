package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/mvcc"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const conditionStore = "object store" // for the health gate

// Thresholds of the size of etcd's file, in percent of its quota. New work is refused while
// there is still room for the writes that end old work.
const (
	defragAt   = 60 // history is compacted, and the file defragmented
	refuseAt   = 80 // new work is refused
	disarmAt   = 95 // an alarm is disarmed below this
	minFreedAt = 10 // the file is not defragmented for less
)

const (
	maintenanceInterval  = time.Second
	outsideInterval      = 5 * time.Second
	defragInterval       = time.Minute     // while the file is large
	urgentDefragInterval = 5 * time.Second // while new work is refused for it
	defragTimeout        = time.Minute
	defragSlack          = 64 << 20 // bytes to leave on the disk beside the new file
)

// maintenance keeps the embedded etcd below its quota as long as it has history to drop.
type maintenance struct {
	etcd  *embed.Etcd
	quota int64 // bytes
	log   *slog.Logger
	tried time.Time // of the last defragmentation
}

// run does what is due and returns why new work must be refused, if it must.
func (u *maintenance) run(ctx context.Context) error {
	full, corrupt := u.alarms()
	if u.due(full) {
		u.tried = time.Now()
		if err := u.compactAndDefrag(ctx, full); err != nil && ctx.Err() == nil {
			u.log.WarnContext(ctx, "etcd not defragmented", telemetry.Error, err)
		}
	}
	size := u.etcd.Server.Backend().Size()
	if full && size < u.share(disarmAt) {
		if err := u.disarm(ctx); err != nil && ctx.Err() == nil {
			u.log.WarnContext(ctx, "etcd alarm not disarmed", telemetry.Error, err)
		}
		full, corrupt = u.alarms()
	}
	switch {
	case corrupt:
		return errs.Public(nil, "its data are damaged; restore them from a backup")
	case full:
		return errs.Public(errStoreFull, "it is full and takes no writes; delete objects that are not needed")
	case size >= u.share(refuseAt):
		return errs.Public(errStoreFull, fmt.Sprintf("%d of %d MiB are in use; delete objects that are not needed, or raise etcdQuota", size>>20, u.quota>>20))
	}
	return nil
}

var errStoreFull = errors.New("etcd's file is near its quota or has reached it")

func (u *maintenance) share(percent int64) int64 { return u.quota / 100 * percent }

// due reports whether it is time to defragment.
func (u *maintenance) due(full bool) bool {
	size, pause := u.etcd.Server.Backend().Size(), defragInterval
	if full || size >= u.share(refuseAt) {
		pause = urgentDefragInterval
	}
	return (full || size >= u.share(defragAt)) && time.Since(u.tried) >= pause
}

func (u *maintenance) alarms() (full, corrupt bool) {
	for _, a := range u.etcd.Server.Alarms() {
		full = full || a.Alarm == pb.AlarmType_NOSPACE
		corrupt = corrupt || a.Alarm == pb.AlarmType_CORRUPT
	}
	return full, corrupt
}

// compactAndDefrag drops the history of all objects, and then the free pages of the file, if they
// are many and the disk has room for the new file. Reads and writes wait meanwhile.
func (u *maintenance) compactAndDefrag(ctx context.Context, full bool) error {
	ctx, cancel := context.WithTimeout(ctx, defragTimeout)
	defer cancel()
	s := u.etcd.Server
	_, err := s.Compact(ctx, &pb.CompactionRequest{Revision: s.KV().Rev(), Physical: true})
	if err != nil && !errors.Is(err, mvcc.ErrCompacted) {
		return fmt.Errorf("compact: %w", err)
	}
	before, used := s.Backend().Size(), s.Backend().SizeInUse()
	u.log.DebugContext(ctx, "etcd compacted", "size", before, "in_use", used)
	if !full && before-used < u.share(minFreedAt) {
		return nil
	}
	free, err := durable.Free(u.etcd.Config().Dir)
	if err != nil {
		return err
	}
	if free < used+defragSlack {
		return fmt.Errorf("defragment: %d bytes are free on its disk, %d are needed", free, used+defragSlack)
	}
	if err := s.Defragment(); err != nil {
		return fmt.Errorf("defragment: %w", err)
	}
	u.log.InfoContext(ctx, "etcd defragmented", "before", before, "after", s.Backend().Size())
	return nil
}

// disarm lets etcd take writes again.
func (u *maintenance) disarm(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, defragTimeout)
	defer cancel()
	_, err := u.etcd.Server.Alarm(ctx, &pb.AlarmRequest{
		MemberID: uint64(u.etcd.Server.MemberID()), Action: pb.AlarmRequest_DEACTIVATE, Alarm: pb.AlarmType_NOSPACE,
	})
	if err == nil {
		u.log.InfoContext(ctx, "etcd alarm disarmed")
	}
	return err
}

// alarmOf returns why new work must be refused on an existing etcd.
func alarmOf(ctx context.Context, c *clientv3.Client) error {
	limited, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	list, err := c.AlarmList(limited)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return errs.Public(err, "etcd does not answer")
	}
	for _, a := range list.Alarms {
		if a.Alarm != pb.AlarmType_NONE {
			return errs.Public(nil, "etcd has the alarm "+a.Alarm.String())
		}
	}
	return nil
}
