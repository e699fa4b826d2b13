package adminapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// lastAnswers is how long a server that stops lets its last answers be read.
const lastAnswers = 5 * time.Second

// Socket is a unix socket and who may open it beside its owner.
type Socket struct {
	Path string
	// GID is the group that may open it; -1: none.
	GID int
	// Shared has the directory be open to others, if it is made.
	Shared bool
}

// Serve answers HTTP on a unix socket until ctx is done. A socket that is there already was left behind, and
// is replaced: the caller makes sure that no other process serves it.
func Serve(ctx context.Context, at Socket, h http.Handler, log *slog.Logger) error {
	mode := os.FileMode(0o700)
	if at.Shared {
		mode = 0o755
	}
	if err := os.MkdirAll(filepath.Dir(at.Path), mode); err != nil {
		return fmt.Errorf("make directory of socket: %w", err)
	}
	if err := os.Remove(at.Path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove old socket: %w", err)
	}
	l, err := at.listen(ctx)
	if err != nil {
		return err
	}
	return at.serve(ctx, l, h, log)
}

// listen opens the socket under a name of its own and moves it into place when
// it is closed to others.
func (at Socket) listen(ctx context.Context) (net.Listener, error) {
	tmp := at.Path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove half-made socket: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", tmp)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	mode := os.FileMode(0o600)
	if at.GID >= 0 {
		mode, err = 0o660, os.Chown(tmp, -1, at.GID)
	}
	if err == nil {
		err = os.Chmod(tmp, mode)
	}
	if err == nil {
		err = os.Rename(tmp, at.Path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("place socket: %w", err), l.Close())
	}
	return l, nil
}

func (at Socket) serve(ctx context.Context, l net.Listener, h http.Handler, log *slog.Logger) error {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		// Long work ends with the server, not with its last answers.
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	var served error
	var wg sync.WaitGroup
	over, end := context.WithCancel(ctx)
	defer end()
	wg.Go(func() {
		served = srv.Serve(l)
		end()
	})
	<-over.Done()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastAnswers)
	defer cancel()
	if srv.Shutdown(grace) != nil {
		_ = srv.Close() // remaining connections would not end on their own
	}
	wg.Wait()
	err := os.Remove(at.Path)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(fmt.Errorf("serve %s: %w", at.Path, served), err)
	}
	return err
}
