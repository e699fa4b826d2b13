package apiserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// ErrStorage says that etcd in this process has given up over its files and cannot go on. What
// it had acknowledged is on disk; only a new process can open it again.
var ErrStorage = errors.New("the store of objects cannot go on")

// conditionStore names the store among what may be wrong.
const conditionStore = "object store"

// What is done as etcd's file grows, in hundredths of its quota. New work is refused while
// there is still room for the writes that end old work.
const (
	tidyAt   = 60 // history is dropped, and the file made anew without its holes
	refuseAt = 80 // new work is refused
	disarmAt = 95 // an alarm is taken back below this
	worthAt  = 10 // holes of less than this are left
)

const (
	upkeepEvery  = time.Second
	outsideEvery = 5 * time.Second
	tidyEvery    = time.Minute     // while the file is large
	rescueEvery  = 5 * time.Second // while new work is refused for it
	tidyTimeout  = time.Minute
	tidySlack    = 64 << 20 // bytes to leave on the disk beside the new file
)

// maintenance keeps the embedded etcd below its quota as long as there is anything to drop, and
// tells the gate when there is not.
type maintenance struct {
	etcd  *embed.Etcd
	quota int64 // bytes
	gate  *health.Gate
	log   *slog.Logger
	tried time.Time // of the last tidying
}

// run looks until ctx is done.
func (u *maintenance) run(ctx context.Context) error {
	return lifecycle.Every(ctx, upkeepEvery, func() { u.gate.Set(conditionStore, u.look(ctx)) })
}

// look does what is due and returns why new work must be refused, if it must.
func (u *maintenance) look(ctx context.Context) error {
	full, corrupt := u.alarms()
	if u.due(full) {
		u.tried = time.Now()
		if err := u.compactAndDefrag(ctx, full); err != nil && ctx.Err() == nil {
			u.log.WarnContext(ctx, "etcd's file not made smaller", telemetry.Error, err)
		}
	}
	size := u.etcd.Server.Backend().Size()
	if full && size < u.share(disarmAt) {
		if err := u.disarm(ctx); err != nil && ctx.Err() == nil {
			u.log.WarnContext(ctx, "etcd's alarm not taken back", telemetry.Error, err)
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

// due reports whether it is time to make the file smaller.
func (u *maintenance) due(full bool) bool {
	size, pause := u.etcd.Server.Backend().Size(), tidyEvery
	if full || size >= u.share(refuseAt) {
		pause = rescueEvery
	}
	return (full || size >= u.share(tidyAt)) && time.Since(u.tried) >= pause
}

func (u *maintenance) alarms() (full, corrupt bool) {
	for _, a := range u.etcd.Server.Alarms() {
		full = full || a.Alarm == pb.AlarmType_NOSPACE
		corrupt = corrupt || a.Alarm == pb.AlarmType_CORRUPT
	}
	return full, corrupt
}

// tidy drops the history of all objects, and then the holes that it leaves in the file, where
// that is worth it and the disk has room for the new file. Reads and writes wait meanwhile.
func (u *maintenance) compactAndDefrag(ctx context.Context, full bool) error {
	ctx, cancel := context.WithTimeout(ctx, tidyTimeout)
	defer cancel()
	s := u.etcd.Server
	_, err := s.Compact(ctx, &pb.CompactionRequest{Revision: s.KV().Rev(), Physical: true})
	if err != nil && !errors.Is(err, mvcc.ErrCompacted) {
		return fmt.Errorf("drop history: %w", err)
	}
	before, used := s.Backend().Size(), s.Backend().SizeInUse()
	u.log.DebugContext(ctx, "etcd's history dropped", "size", before, "in_use", used)
	if holes := before - used; !full && holes < u.share(worthAt) {
		return nil
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(u.etcd.Config().Dir, &disk); err != nil {
		return fmt.Errorf("look at the disk: %w", err)
	}
	if free := int64(disk.Bavail) * disk.Bsize; free < used+tidySlack {
		return fmt.Errorf("make the file anew: %d bytes are free on its disk, %d are needed", free, used+tidySlack)
	}
	if err := s.Defragment(); err != nil {
		return fmt.Errorf("make the file anew: %w", err)
	}
	u.log.InfoContext(ctx, "etcd's file made smaller", "before", before, "after", s.Backend().Size())
	return nil
}

// disarm lets etcd take writes again.
func (u *maintenance) disarm(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tidyTimeout)
	defer cancel()
	_, err := u.etcd.Server.Alarm(ctx, &pb.AlarmRequest{
		MemberID: uint64(u.etcd.Server.MemberID()), Action: pb.AlarmRequest_DEACTIVATE, Alarm: pb.AlarmType_NOSPACE,
	})
	if err == nil {
		u.log.InfoContext(ctx, "etcd takes writes again")
	}
	return err
}

// watchOutside tells the gate how an existing etcd is. Its upkeep is somebody else's.
func (s *Server) watchOutside(ctx context.Context, c *clientv3.Client) {
	_ = lifecycle.Every(ctx, outsideEvery, func() { s.cfg.Gate.Set(conditionStore, askOutside(ctx, c)) }) // it ends with ctx alone
}

func askOutside(ctx context.Context, c *clientv3.Client) error {
	limited, cancel := context.WithTimeout(ctx, etcdProbeTimeout)
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

// full gives the errors of an etcd that does not take a write the kind and the words of a refusal.
func full(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace):
		return apierrors.NewServiceUnavailable("the object store is full and takes no writes until something is deleted")
	case errors.Is(err, rpctypes.ErrRequestTooLarge):
		return apierrors.NewRequestEntityTooLargeError("an object may have at most 1.5 MiB")
	}
	return err
}

// closed is why nothing new may be made of a kind, if so. Events and namespaces always may:
// they tell what is wrong, and are there before anything can be.
func (s *store) closed() error {
	err := s.health.Err()
	if err == nil || s.r.ttlSeconds > 0 || s.isNamespaces() {
		return nil
	}
	text, _ := errs.PublicMessage(err)
	return apierrors.NewServiceUnavailable(text)
}
