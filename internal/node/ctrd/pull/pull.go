// Package pull fetches images from registries into containerd: by mirrors and with the authorities of the settings, within
// bounds of size, layers and time, and again from where an earlier attempt was interrupted.
//
// It decides nothing about who may use an image, and lets each call pull for itself; package images does the rest.
package pull

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

const (
	// Timeout bounds pulling and unpacking one image.
	Timeout = 30 * time.Minute
	// DefaultMaxBytes bounds an image whose Config sets no bound.
	DefaultMaxBytes = 32 << 30
	// DefaultStallTimeout is how long a pull may receive nothing.
	DefaultStallTimeout = 5 * time.Minute
	// maxLayers bounds the layers of an image: the kernel mounts at most 500, and those of checkpoints lie on them.
	maxLayers = 256
	// pollProgress is how often a pull is measured.
	pollProgress = 200 * time.Millisecond
	// keepPart is how long containerd at least keeps what an interrupted pull has received.
	keepPart = 24 * time.Hour
	// discards bounds how often a pull drops incomplete blobs. A writer of containerd's that is still closing can leave one again, which
	// is not listed before, so each but the first waits for discardPause.
	discards     = 4
	discardPause = 100 * time.Millisecond
	// leasePrefix is of the leases that keep it.
	leasePrefix = "barchan-pull-"
)

// Credentials are of a registry; the zero value is anonymous.
type Credentials struct{ Username, Password string }

// Config configures a Puller. All of it may be empty.
type Config struct {
	Registries
	// MaxBytes bounds an image, in bytes of its content, compressed; zero: DefaultMaxBytes.
	MaxBytes int64
	// StallTimeout is how long a pull may receive nothing; zero: DefaultStallTimeout.
	StallTimeout time.Duration
}

// Puller pulls images. It is safe for concurrent use.
type Puller struct {
	cfg         Config
	snapshotter string
}

// New checks the configuration, which is an errs.ErrInvalid if it cannot be used.
func New(cfg Config, snapshotter string) (*Puller, error) {
	if cfg.MaxBytes < 0 {
		return nil, fmt.Errorf("pull images: a bound of %d bytes: %w", cfg.MaxBytes, errs.ErrInvalid)
	}
	cfg.MaxBytes, cfg.StallTimeout = cmp.Or(cfg.MaxBytes, DefaultMaxBytes), cmp.Or(cfg.StallTimeout, DefaultStallTimeout)
	return &Puller{cfg: cfg, snapshotter: snapshotter}, cfg.check()
}

// Request is one pull.
type Request struct {
	// Ref is the image's full name, Labels those of its record in containerd.
	Ref         string
	Credentials Credentials
	Labels      map[string]string
	// Progress receives the bytes received and their total; nil: none.
	Progress func(done, total int64)
	// Room is called with the bytes of an image before its layers are fetched; its error ends the pull. Nil: not called.
	Room func(ctx context.Context, bytes int64) error
	// Space is called again and again; its error ends the pull. Nil: not called.
	Space func() error
}

func (p *Puller) resolver(creds Credentials) remotes.Resolver {
	return resolverOf{docker.NewResolver(docker.ResolverOptions{Hosts: p.cfg.hosts(creds)})}
}

// resolverOf hides the optional methods of a resolver, whose limits belong to another caller.
type resolverOf struct{ remotes.Resolver }

// Check returns nil if a registry has an image of that digest for the credentials.
func (p *Puller) Check(ctx context.Context, ref string, creds Credentials) error {
	_, _, err := p.resolver(creds).Resolve(ctx, ref)
	return explain(err)
}

// Pull fetches and unpacks an image. What an interrupted pull has received is kept, and used by the next one of that name.
func (p *Puller) Pull(ctx context.Context, api *containerd.Client, req Request) (containerd.Image, error) {
	ctx, stop := context.WithTimeout(ctx, Timeout)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lease, err := leaseOf(ctx, api, req.Ref)
	if err != nil {
		return nil, err
	}
	w := &watch{api: api, puller: p, req: req, seen: map[digest.Digest]int64{}, cancel: cancel}
	end := w.run(ctx)
	img, err := p.fetch(leases.WithLease(ctx, lease.ID), w)
	for i := range discards {
		answer, answered := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
		if !answered || answer.StatusCode != http.StatusRequestedRangeNotSatisfiable {
			break
		}
		if i > 0 {
			lifecycle.Sleep(ctx, discardPause)
		}
		w.discard(ctx)
		img, err = p.fetch(leases.WithLease(ctx, lease.ID), w)
	}
	end()
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, ctx.Err()) {
		err = cause
	}
	if err == nil || errs.Kind(err) != nil { // one that is refused would be again
		release, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer stop()
		_ = api.LeasesService().Delete(release, lease) // otherwise it expires
	}
	return img, explain(err)
}

func (p *Puller) fetch(ctx context.Context, w *watch) (containerd.Image, error) {
	return w.api.Pull(ctx, w.req.Ref,
		containerd.WithPullUnpack, containerd.WithPullSnapshotter(p.snapshotter), containerd.WithPullLabels(w.req.Labels),
		containerd.WithResolver(p.resolver(w.req.Credentials)),
		containerd.WithImageHandler(images.HandlerFunc(w.add)), containerd.WithImageHandlerWrapper(w.bound))
}

// explained is an error of containerd whose text is one for users: it has no steps on the way, each with the same reference.
type explained struct {
	error
	text string
}

func (e explained) Error() string { return e.text }

func (e explained) Unwrap() error { return e.error }

// explain says what a registry answered, or why there was no answer. The answer of one that denies access is an errs.ErrForbidden.
func explain(err error) error {
	answer, answered := errors.AsType[remoteerrors.ErrUnexpectedStatus](err)
	request, unanswered := errors.AsType[*url.Error](err)
	switch {
	case err == nil, errs.Kind(err) != nil:
		return err
	case errdefs.IsUnauthorized(err), errdefs.IsPermissionDenied(err), errors.Is(err, docker.ErrInvalidAuthorization),
		answered && (answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden):
		return fmt.Errorf("%w: %w", explained{err, "access denied by the registry; the image may not exist"}, errs.ErrForbidden)
	case errdefs.IsNotFound(err):
		return explained{err, "the registry has no such image"}
	case answered:
		return explained{err, "the registry answered " + answer.Status}
	case unanswered:
		return explained{err, fmt.Sprintf("the registry does not answer: %v", request.Err)}
	}
	return err
}

// leaseOf returns the lease of pulls of a name, by which containerd keeps what an interrupted one has received. It is another
// one each day, so that it never expires while one runs.
func leaseOf(ctx context.Context, api *containerd.Client, ref string) (leases.Lease, error) {
	day := time.Now().Unix() / int64(keepPart/time.Second)
	sum := sha256.Sum256(fmt.Append(nil, ref, day))
	id := leasePrefix + hex.EncodeToString(sum[:16])
	l, err := api.LeasesService().Create(ctx, leases.WithID(id), leases.WithExpiration(2*keepPart+Timeout))
	if errdefs.IsAlreadyExists(err) {
		return leases.Lease{ID: id}, nil
	}
	return l, err
}

// watch measures and bounds one pull.
type watch struct {
	api    *containerd.Client
	puller *Puller
	req    Request
	cancel context.CancelCauseFunc

	mu   sync.Mutex
	seen map[digest.Digest]int64 // +checklocks:mu
}

// add is an images.Handler that notes what is to be fetched.
func (w *watch) add(_ context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[d.Digest] = d.Size
	return nil, nil
}

// bound wraps a handler of a pull, and refuses an image that is too large before its layers are fetched.
func (w *watch) bound(next images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		children, err := next.Handle(ctx, d)
		if err != nil || !images.IsManifestType(d.MediaType) {
			return children, err
		}
		sum, missing, layers := int64(0), int64(0), 0
		for _, c := range children {
			if c.Size < 0 || c.Size > w.puller.cfg.MaxBytes {
				sum = w.puller.cfg.MaxBytes + 1
				break
			}
			sum += c.Size
			if images.IsLayerType(c.MediaType) {
				layers++
			}
			if _, err := w.api.ContentStore().Info(ctx, c.Digest); err != nil {
				missing += c.Size
			}
		}
		switch {
		case layers > maxLayers:
			return nil, fmt.Errorf("the image has %d layers, the maximum is %d: %w", layers, maxLayers, errs.ErrTooLarge)
		case sum > w.puller.cfg.MaxBytes:
			return nil, fmt.Errorf("the image has more than %d bytes, the maximum (setting maxImage): %w", w.puller.cfg.MaxBytes, errs.ErrTooLarge)
		case w.req.Room != nil:
			err = w.req.Room(ctx, missing)
		}
		return children, err
	})
}

// run measures until the returned function is called.
func (w *watch) run(ctx context.Context) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(pollProgress)
		defer tick.Stop()
		last, at := int64(-1), time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			done, total := w.measure(ctx)
			if done != last || done == total {
				last, at = done, time.Now()
			}
			if time.Since(at) > w.puller.cfg.StallTimeout {
				w.cancel(fmt.Errorf("the registry has sent nothing for %s: %w", w.puller.cfg.StallTimeout, errdefs.ErrUnavailable))
			}
			if w.req.Space != nil {
				if err := w.req.Space(); err != nil {
					w.cancel(err)
				}
			}
		}
	})
	return func() {
		cancel()
		running.Wait()
		if done, total := w.measure(context.WithoutCancel(ctx)); w.req.Progress != nil {
			w.req.Progress(done, total)
		}
	}
}

// parts returns what is to be fetched.
func (w *watch) parts() map[digest.Digest]int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.seen)
}

// discard removes incomplete blobs, which a registry without ranges cannot complete. It ignores errors: the next fetch shows them.
func (w *watch) discard(ctx context.Context) {
	arriving, err := w.api.ContentStore().ListStatuses(ctx, "")
	if err != nil {
		return
	}
	for d := range w.parts() {
		for _, a := range arriving {
			if strings.HasSuffix(a.Ref, d.String()) {
				_ = w.api.ContentStore().Abort(ctx, a.Ref)
			}
		}
	}
}

// measure reads the received bytes from containerd. It ignores errors: the next call follows.
func (w *watch) measure(ctx context.Context) (done, total int64) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	parts := w.parts()
	for _, size := range parts {
		total += size
	}
	arriving, err := w.api.ContentStore().ListStatuses(ctx, "")
	if err != nil {
		return 0, total
	}
	for d, size := range parts {
		if _, err := w.api.ContentStore().Info(ctx, d); err == nil {
			done += size
		}
	}
	for _, a := range arriving {
		if _, ours := parts[a.Expected]; ours {
			done += a.Offset
		}
	}
	if w.req.Progress != nil {
		w.req.Progress(done, total)
	}
	return done, total
}
