// Package ctrd keeps images, snapshots and container records in containerd, and keeps
// containerd itself running where it is ours. It is the only user of containerd. It runs no
// containers: records are the books of what the runtimes run, and keep their snapshots and
// images from being collected.
package ctrd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"google.golang.org/grpc"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// DefaultNamespace is the containerd namespace of an instance that names no other.
const DefaultNamespace = "barchan"

// snapshotter keeps root filesystems as overlays, whose upper directory has what was written.
const snapshotter = "overlayfs"

// DefaultCallTimeout is a Config's that sets none.
const DefaultCallTimeout = 20 * time.Second

// labelRoot keeps an object from containerd's garbage collection by itself.
const labelRoot = "containerd.io/gc.root"

// Config says which containerd to use.
type Config struct {
	// Address is the path of its socket.
	Address string
	// Namespace keeps instances on one containerd apart; empty means DefaultNamespace.
	Namespace string
	// CallTimeout bounds each call that is not a transfer of data, so that a containerd that hangs or
	// is being restarted becomes an error and not a wait; zero means DefaultCallTimeout.
	CallTimeout time.Duration
}

// Client uses one namespace of a containerd. It is safe for concurrent use.
type Client struct {
	api         *containerd.Client
	namespace   string
	callTimeout time.Duration
	images      imageCache
}

// NewClient prepares a client. It connects with the first call, and again after every break.
func NewClient(cfg Config) (*Client, error) {
	if cfg.Address == "" {
		return nil, fmt.Errorf("containerd: the socket's address is needed: %w", errs.ErrInvalid)
	}
	if cfg.Namespace == "" {
		cfg.Namespace = DefaultNamespace
	}
	// The library logs what it also returns; whoever gets the error decides.
	if err := log.SetLevel("panic"); err != nil {
		return nil, fmt.Errorf("silence containerd's library: %w", err)
	}
	api, err := containerd.New(cfg.Address,
		containerd.WithDefaultNamespace(cfg.Namespace),
		containerd.WithTimeout(time.Second), // the longest pause between two tries to connect
		containerd.WithCallOpts([]grpc.CallOption{grpc.WaitForReady(true)}))
	if err != nil {
		return nil, fmt.Errorf("connect to containerd at %s: %w", cfg.Address, err)
	}
	return &Client{api: api, namespace: cfg.Namespace, callTimeout: cmp.Or(cfg.CallTimeout, DefaultCallTimeout)}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.api.Close() }

// Check returns nil if containerd answers.
func (c *Client) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	if _, err := c.api.Version(ctx); err != nil {
		return kind("ask containerd for its version", err)
	}
	return nil
}

// kind wraps an error of containerd in ours, by which callers act.
func kind(action string, err error) error {
	k := errs.ErrUnavailable
	switch {
	case err == nil:
		return nil
	case errs.Kind(err) != nil:
		return fmt.Errorf("%s: %w", action, err)
	case errdefs.IsNotFound(err):
		k = errs.ErrNotFound
	case errdefs.IsInvalidArgument(err):
		k = errs.ErrInvalid
	case errdefs.IsAlreadyExists(err), errdefs.IsFailedPrecondition(err):
		k = errs.ErrConflict
	case errdefs.IsDeadlineExceeded(err), errors.Is(err, context.DeadlineExceeded):
		k = errs.ErrUnavailable
	}
	return fmt.Errorf("%s: %w: %w", action, err, k)
}

// uninterrupted bounds a call that changes something, and lets nothing else end it: containerd goes
// on with a call whose caller has gone, and would do it after the caller had undone it.
func (c *Client) uninterrupted(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), c.callTimeout)
}

// Progress is how far a transfer of an image is.
type Progress struct {
	// Ref is the image's name.
	Ref string
	// Step is one of "resolve", "read", "download", "unpack", "done".
	Step string
	// Done and Total count bytes; Total is zero where it is not known.
	Done, Total int64
}

// report calls f unless it is nil.
func (p Progress) report(f func(Progress)) {
	if f != nil {
		f(p)
	}
}
