package files

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

const (
	// maxWatchers bounds the watchers of clients that poll.
	maxWatchers = 1000
	// maxPending bounds the events that wait for a poll; beyond it the oldest are dropped.
	maxPending = 100_000
)

func watchError(err error) error {
	return connect.NewError(connect.CodeInternal, fmt.Errorf("watch: %w", err))
}

// next waits for the next inotify event, or until quit closes.
func (w *watch) next(quit <-chan struct{}, tick <-chan time.Time) (events []*filesystempb.FilesystemEvent, ticked bool, err error) {
	select {
	case <-quit:
		return nil, false, context.Canceled
	case <-tick:
		return nil, true, nil
	case err, ok := <-w.notify.Errors:
		if !ok {
			err = errors.New("watcher closed")
		}
		return nil, false, watchError(err)
	case n, ok := <-w.notify.Events:
		if !ok {
			return nil, false, watchError(errors.New("watcher closed"))
		}
		events, err := w.translate(n)
		if err != nil {
			err = watchError(err)
		}
		return events, false, err
	}
}

// WatchDir streams changes.
func (s *RPC) WatchDir(ctx context.Context, req *connect.Request[filesystempb.WatchDirRequest], stream *connect.ServerStream[filesystempb.WatchDirResponse]) error {
	path, err := s.watchable(req.Header(), req.Msg.GetPath(), req.Msg.GetAllowNetworkMounts())
	if err != nil {
		return err
	}
	w, err := newWatch(path, req.Msg.GetRecursive(), req.Msg.GetIncludeEntry(), s.Users.Accounts, s.Uploads)
	if err != nil {
		return watchError(err)
	}
	defer func() { _ = w.close() }()
	start := &filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Start{Start: &filesystempb.WatchDirResponse_StartEvent{}}}
	if err := stream.Send(start); err != nil {
		return err
	}
	interval := reply.Keepalive(req.Header())
	keepalive := time.NewTimer(interval)
	defer keepalive.Stop()
	for {
		events, ticked, err := w.next(ctx.Done(), keepalive.C)
		if ctx.Err() != nil {
			return reply.ContextError(ctx)
		}
		for _, ev := range events {
			if err := stream.Send(&filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Filesystem{Filesystem: ev}}); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		if ticked {
			alive := &filesystempb.WatchDirResponse{Event: &filesystempb.WatchDirResponse_Keepalive{Keepalive: &filesystempb.WatchDirResponse_KeepAlive{}}}
			if err := stream.Send(alive); err != nil {
				return err
			}
		}
		if ticked || len(events) > 0 {
			keepalive.Reset(interval)
		}
	}
}

// Watchers collect events for clients that poll.
type Watchers struct {
	running sync.WaitGroup
	mu      sync.Mutex
	byID    map[string]*watcher // +checklocks:mu
	over    bool                // +checklocks:mu
}

type watcher struct {
	quit  chan struct{}
	marks string        // directory of marks; empty: none
	ended chan struct{} // closed after collect

	mu      sync.Mutex
	made    int                             // +checklocks:mu
	waiting map[string]chan struct{}        // +checklocks:mu
	pending []*filesystempb.FilesystemEvent // +checklocks:mu
	err     error                           // +checklocks:mu
}

// NewWatchers returns an empty set.
func NewWatchers() *Watchers { return &Watchers{byID: map[string]*watcher{}} }

// CreateWatcher begins to collect events.
func (s *RPC) CreateWatcher(_ context.Context, req *connect.Request[filesystempb.CreateWatcherRequest]) (*connect.Response[filesystempb.CreateWatcherResponse], error) {
	path, err := s.watchable(req.Header(), req.Msg.GetPath(), req.Msg.GetAllowNetworkMounts())
	if err != nil {
		return nil, err
	}
	w, err := newWatch(path, req.Msg.GetRecursive(), req.Msg.GetIncludeEntry(), s.Users.Accounts, s.Uploads)
	if err != nil {
		return nil, watchError(err)
	}
	w.mark()
	id, err := s.Watchers.add(w)
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	return connect.NewResponse(&filesystempb.CreateWatcherResponse{WatcherId: id}), nil
}

// GetWatcherEvents returns the events since the last call.
func (s *RPC) GetWatcherEvents(ctx context.Context, req *connect.Request[filesystempb.GetWatcherEventsRequest]) (*connect.Response[filesystempb.GetWatcherEventsResponse], error) {
	c, err := s.Watchers.find(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	c.catchUp(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	events := c.pending
	c.pending = nil
	if len(events) == 0 && c.err != nil {
		return nil, c.err
	}
	return connect.NewResponse(&filesystempb.GetWatcherEventsResponse{Events: events}), nil
}

// RemoveWatcher stops collecting.
func (s *RPC) RemoveWatcher(_ context.Context, req *connect.Request[filesystempb.RemoveWatcherRequest]) (*connect.Response[filesystempb.RemoveWatcherResponse], error) {
	if err := s.Watchers.remove(req.Msg.GetWatcherId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystempb.RemoveWatcherResponse{}), nil
}

func (ws *Watchers) add(w *watch) (string, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.over {
		return "", connect.NewError(connect.CodeUnavailable, reply.ErrStopping)
	}
	if len(ws.byID) >= maxWatchers {
		return "", connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d watchers exist: remove some", maxWatchers))
	}
	id := "w" + strings.ToLower(rand.Text())
	c := &watcher{quit: make(chan struct{}), ended: make(chan struct{}), marks: w.marks, waiting: map[string]chan struct{}{}}
	ws.byID[id] = c
	ws.running.Go(func() { c.collect(w) })
	return id, nil
}

func (ws *Watchers) find(id string) (*watcher, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	c, ok := ws.byID[id]
	if !ok {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher with id %s not found", id))
	}
	return c, nil
}

func (ws *Watchers) remove(id string) error {
	c, err := ws.find(id)
	if err != nil {
		return err
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.byID[id] == c {
		delete(ws.byID, id)
		close(c.quit)
	}
	return nil
}

// CloseAll stops all watchers and waits for them. None can be added afterwards.
func (ws *Watchers) CloseAll() {
	ws.mu.Lock()
	ws.over = true
	for id, c := range ws.byID {
		delete(ws.byID, id)
		close(c.quit)
	}
	ws.mu.Unlock()
	ws.running.Wait()
}

// markWait bounds the wait for a mark's event.
const markWait = 5 * time.Second

// catchUp returns when all earlier changes have been collected. inotify events are ordered: that of a
// mark follows those of earlier changes.
func (c *watcher) catchUp(ctx context.Context) {
	if c.marks == "" {
		return
	}
	reached := make(chan struct{})
	c.mu.Lock()
	c.made++
	mark := filepath.Join(c.marks, stagePrefix+strconv.Itoa(c.made))
	c.waiting[mark] = reached
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, mark)
		c.mu.Unlock()
		_ = os.Remove(mark) // or close removes its directory
	}()
	if err := os.Mkdir(mark, 0o700); err != nil {
		return // without a mark, return the events so far
	}
	ctx, cancel := context.WithTimeout(ctx, markWait)
	defer cancel()
	select {
	case <-reached:
	case <-c.ended:
	case <-ctx.Done():
	}
}

// reached ends the wait for a mark.
func (c *watcher) reached(mark string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if waits, ok := c.waiting[mark]; ok {
		close(waits)
		delete(c.waiting, mark)
	}
}

// collect gathers events until the watcher is removed.
func (c *watcher) collect(w *watch) {
	defer func() { _ = w.close() }()
	defer close(c.ended)
	w.marked = c.reached
	for {
		events, _, err := w.next(c.quit, nil)
		c.mu.Lock()
		c.pending = append(c.pending, events...)
		if over := len(c.pending) - maxPending; over > 0 {
			c.pending = append([]*filesystempb.FilesystemEvent(nil), c.pending[over:]...)
		}
		c.err = err
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}
