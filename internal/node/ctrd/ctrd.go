// Package ctrd keeps images, snapshots and container metadata in containerd, and supervises our own
// containerd. It is the only user of containerd. It runs no containers: their metadata keeps
// snapshots and images from being collected.
package ctrd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"google.golang.org/grpc"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
)

// DefaultNamespace is the containerd namespace of an instance that sets none.
const DefaultNamespace = "barchan"

// snapshotter keeps root filesystems as overlays, whose upper directory has the writes.
const snapshotter = "overlayfs"

// DefaultCallTimeout applies if a Config sets none.
const DefaultCallTimeout = 20 * time.Second

// removalTimeouts is how many times longer than other calls a removal may take that waits until containerd has deleted the
// files: thousands of them, on a machine that may be busy.
const removalTimeouts = 15

// labelRoot keeps an object from containerd's garbage collection.
const labelRoot = "containerd.io/gc.root"

// Config selects the containerd.
type Config struct {
	// Address is the path of its socket.
	Address string
	// Namespace keeps instances on one containerd apart; empty means DefaultNamespace.
	Namespace string
	// CallTimeout bounds each call that transfers no data, so that a hanging or restarting
	// containerd becomes an error; zero means DefaultCallTimeout.
	CallTimeout time.Duration
	// Pull has the registries, and the bounds of images.
	Pull pull.Config
	// Space is called again and again while an image is imported or unpacked, and its error ends that: a layer's size says
	// nothing of what it becomes. A pull has its own. Nil: not called.
	Space func() error
}

// Client uses one namespace of a containerd. It is safe for concurrent use.
type Client struct {
	api         *containerd.Client
	address     string
	namespace   string
	callTimeout time.Duration
	images      imageCache
	puller      *pull.Puller
	space       func() error
}

// NewClient prepares a client. It connects with the first call, and reconnects.
func NewClient(cfg Config) (*Client, error) {
	if cfg.Address == "" {
		return nil, fmt.Errorf("containerd: socket address required: %w", errs.ErrInvalid)
	}
	if cfg.Namespace == "" {
		cfg.Namespace = DefaultNamespace
	}
	puller, err := pull.New(cfg.Pull, snapshotter)
	if err != nil {
		return nil, err
	}
	// The library logs the errors that it also returns.
	if err := log.SetLevel("panic"); err != nil {
		return nil, fmt.Errorf("disable logs of containerd's library: %w", err)
	}
	api, err := containerd.New(cfg.Address,
		containerd.WithDefaultNamespace(cfg.Namespace),
		containerd.WithTimeout(time.Second), // the longest pause between connection attempts
		containerd.WithCallOpts([]grpc.CallOption{grpc.WaitForReady(true)}))
	if err != nil {
		return nil, fmt.Errorf("connect to containerd at %s: %w", cfg.Address, err)
	}
	return &Client{
		api: api, address: cfg.Address, namespace: cfg.Namespace, callTimeout: cmp.Or(cfg.CallTimeout, DefaultCallTimeout), puller: puller, space: cfg.Space,
	}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.api.Close() }

// Listens reports whether containerd accepts connections. Unlike a call, it does not wait for that, and delays no later one.
func (c *Client) Listens(ctx context.Context) bool {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", strings.TrimPrefix(c.address, "unix://"))
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// Check returns nil if containerd answers.
func (c *Client) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	if _, err := c.api.Version(ctx); err != nil {
		return kind("read version of containerd", err)
	}
	return nil
}

// kind wraps an error of containerd with our kind of error.
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

// uninterrupted bounds a change only by a timeout. containerd completes a call after its caller's
// context has ended, possibly after the caller's undo.
func (c *Client) uninterrupted(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), c.callTimeout)
}

// removal bounds a call that waits until containerd has deleted files.
func (c *Client) removal(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, removalTimeouts*c.callTimeout)
}

// Progress is the progress of an image transfer.
type Progress struct {
	// Ref is the image's name.
	Ref string
	// Step is one of "resolve", "read", "download", "unpack", "done".
	Step string
	// Done and Total count bytes; Total is zero if unknown.
	Done, Total int64
}

// report calls f unless it is nil.
func (p Progress) report(f func(Progress)) {
	if f != nil {
		f(p)
	}
}
