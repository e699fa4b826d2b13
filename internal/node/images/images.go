// Package images finds the images that sandboxes run, and pulls those that are missing: once for any number of waiters, with
// the credentials of their namespaces. It records who may use an image, and when it was last used.
//
// An image that was pulled with credentials is private: a namespace uses it after its own credentials, or none, were accepted
// by the registry for that very digest. Records are labels of the images in containerd; there is no other state on the disk.
//
// It removes nothing; package imagegc decides on that, and calls [Store.Remove].
//
// Locks: Store.mu and flight.mu, never both; no call is made while one is held.
package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
)

const (
	// labelPulled marks images that a registry has, as far as is known.
	labelPulled = "barchan.dev/pulled"
	// labelUsed is when an image was last used, RFC 3339.
	labelUsed = "barchan.dev/last-used"
	// labelPrivate marks images that were pulled with credentials of a namespace.
	labelPrivate = "barchan.dev/private"
	// labelGrant and a namespace: whose credentials the registry has accepted.
	labelGrant = "barchan.dev/grant."
)

// usedEvery is how exact labelUsed is.
const usedEvery = 10 * time.Minute

// Config configures a Store.
type Config struct {
	Containerd *ctrd.Client
	// Objects reads the Secrets that requests name; nil: there are none.
	Objects podsource.Objects
	// Room makes room for that many bytes of an image, or returns why there is none; nil: there always is.
	Room func(ctx context.Context, bytes int64) error
	// Pulled is called after each pull; nil: not called.
	Pulled func()
	// Space returns why no more may be written; nil: no limit.
	Space func() error
	// Later runs a function in the background. Required.
	Later func(func(context.Context))
	Log   *slog.Logger
}

// localHost is in the names of images that are made here. A mirror may have them, but no registry has that name.
const localHost = "barchan.local"

// Store has the images of a node. It is safe for concurrent use.
type Store struct {
	cfg Config

	mu      sync.Mutex
	flights map[string]*flight   // running pulls, by image and credentials; +checklocks:mu
	used    map[string]time.Time // by reference, since the start; +checklocks:mu
}

// New starts nothing.
func New(cfg Config) (*Store, error) {
	if cfg.Containerd == nil || cfg.Log == nil || cfg.Later == nil {
		return nil, fmt.Errorf("images: containerd, a logger and Later are needed: %w", errs.ErrInvalid)
	}
	return &Store{cfg: cfg, flights: map[string]*flight{}, used: map[string]time.Time{}}, nil
}

// Ask is a request for an image.
type Ask struct {
	// Ref is the image's name, Policy when it is pulled; empty: if it is missing.
	Ref    string
	Policy corev1.PullPolicy
	// Namespace is who uses it, Secrets its Secrets with credentials. Empty: the operator, who may use all images.
	Namespace string
	Secrets   []string
	// Credentials are the operator's.
	Credentials pull.Credentials
	// Progress receives the steps of a pull; nil: none.
	Progress func(ctrd.Progress)
}

// Find returns an image, and pulls it as its policy requires. The error of one that there is not at the moment, or not for that
// namespace, is marked by sandbox.NoImage.
func (s *Store) Find(ctx context.Context, ask Ask) (ctrd.Image, error) {
	full, err := ctrd.Normalize(ask.Ref)
	if err != nil {
		return ctrd.Image{}, err
	}
	ask.Ref = full
	if ask.Policy != corev1.PullAlways {
		img, err := s.cfg.Containerd.Resolve(ctx, full)
		if err == nil {
			err = s.admit(ctx, img, &ask)
		}
		if err == nil {
			s.touch(img)
			return img, nil
		}
		if !errors.Is(err, errs.ErrNotFound) {
			return ctrd.Image{}, err
		}
		if ask.Policy == corev1.PullNever {
			return ctrd.Image{}, sandbox.NoImage(fmt.Errorf("image %q is not on this node, and imagePullPolicy is Never: %w", full, errs.ErrNotFound))
		}
	}
	creds, err := s.credentials(ctx, &ask)
	if err != nil {
		return ctrd.Image{}, sandbox.NoImage(err)
	}
	img, err := s.pull(ctx, &ask, creds)
	switch {
	case err == nil:
		return img, nil
	case strings.HasPrefix(full, localHost+"/") && errors.Is(err, errs.ErrUnavailable):
		err = fmt.Errorf("image %q is not on this node; images of %s are made by `barchan image build`: %w", full, localHost, errs.ErrUnavailable)
	default:
		err = fmt.Errorf("image is not on this node: %w", err)
	}
	return ctrd.Image{}, sandbox.NoImage(err)
}

// admit returns nil if the namespace may use a local image. It asks the registry if that is not recorded.
func (s *Store) admit(ctx context.Context, img ctrd.Image, ask *Ask) error {
	if ask.Namespace == "" || img.Labels[labelPrivate] == "" {
		return nil
	}
	creds, err := s.credentials(ctx, ask)
	if err != nil {
		return sandbox.NoImage(err)
	}
	if granted(img.Labels[labelGrant+ask.Namespace], img.Digest, creds) {
		return nil
	}
	err = s.cfg.Containerd.CheckPull(ctx, img, creds)
	switch {
	case errors.Is(err, errs.ErrNotFound): // the registry has another one by now
		return err
	case err != nil:
		return sandbox.NoImage(fmt.Errorf("image %q is private, and namespace %s has no access to it by its imagePullSecrets: %w", img.Ref, ask.Namespace, err))
	}
	return s.grant(ctx, img, ask.Namespace, creds)
}

// grant records that the registry has accepted the credentials of a namespace.
func (s *Store) grant(ctx context.Context, img ctrd.Image, namespace string, creds pull.Credentials) error {
	err := s.cfg.Containerd.LabelImage(ctx, img, map[string]string{labelGrant + namespace: grantOf(img.Digest, creds)})
	failpoint.Reach("images/grant")
	return err
}

// pull fetches an image once for all that wait for it with the same credentials.
func (s *Store) pull(ctx context.Context, ask *Ask, creds pull.Credentials) (ctrd.Image, error) {
	private := ask.Namespace != "" && creds != (pull.Credentials{})
	key := fmt.Sprintf("%s %t %s", ask.Ref, private, digestOf("", creds))
	img, err := s.share(ctx, key, ask, func(ctx context.Context, report func(ctrd.Progress)) (ctrd.Image, error) {
		labels := map[string]string{labelPulled: "true", labelUsed: time.Now().UTC().Format(time.RFC3339)}
		if private {
			labels[labelPrivate] = "true"
		}
		img, err := s.cfg.Containerd.Pull(ctx, ctrd.PullRequest{
			Ref: ask.Ref, Credentials: creds, Labels: labels, Progress: report, Room: s.cfg.Room, Space: s.cfg.Space,
		})
		if err == nil {
			failpoint.Reach("images/pulled")
			if s.cfg.Pulled != nil {
				s.cfg.Pulled()
			}
			s.cfg.Log.InfoContext(ctx, "image pulled", telemetry.Image, img.Ref, "digest", img.Digest)
		}
		return img, err
	})
	if err == nil && private {
		err = s.grant(ctx, img, ask.Namespace, creds)
	}
	if err == nil {
		s.touch(img)
	}
	return img, err
}

// touch records a use.
func (s *Store) touch(img ctrd.Image) {
	now := time.Now()
	s.mu.Lock()
	before := s.used[img.Ref]
	s.used[img.Ref] = now
	s.mu.Unlock()
	if before.IsZero() {
		before = parsed(img.Labels[labelUsed])
	}
	if now.Sub(before) < usedEvery {
		return
	}
	s.cfg.Later(func(ctx context.Context) {
		err := s.cfg.Containerd.LabelImage(ctx, img, map[string]string{labelUsed: now.UTC().Format(time.RFC3339)})
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			s.cfg.Log.WarnContext(ctx, "use of an image not recorded", telemetry.Image, img.Ref, telemetry.Error, err)
		}
	})
}

func parsed(text string) time.Time {
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}
	}
	return t
}

// Info is an image of the node.
type Info struct {
	ctrd.ImageInfo
	LastUsed time.Time
	// Pulled: a registry has it. Others were imported or made here.
	Pulled bool
	// Private: namespaces need credentials for it.
	Private bool
	// Pulling: it is being pulled again.
	Pulling bool
}

// List returns all images by name.
func (s *Store) List(ctx context.Context) ([]Info, error) { return s.list(ctx) }

// Named returns the image of a whole name, if there is one.
func (s *Store) Named(ctx context.Context, ref string) ([]Info, error) { return s.list(ctx, ref) }

func (s *Store) list(ctx context.Context, names ...string) ([]Info, error) {
	list, err := s.cfg.Containerd.Images(ctx, names...)
	if err != nil {
		return nil, err
	}
	out := make([]Info, len(list))
	s.mu.Lock()
	defer s.mu.Unlock()
	pulling := map[string]bool{}
	for _, f := range s.flights {
		pulling[f.ref] = true
	}
	for i, x := range list {
		used := parsed(x.Labels[labelUsed])
		if t := s.used[x.Ref]; t.After(used) {
			used = t
		}
		if used.IsZero() {
			used = x.Created
		}
		out[i] = Info{
			ImageInfo: x, LastUsed: used, Pulled: x.Labels[labelPulled] != "", Private: x.Labels[labelPrivate] != "", Pulling: pulling[x.Ref],
		}
	}
	return out, nil
}

// Remove removes an image.
func (s *Store) Remove(ctx context.Context, ref string) error {
	return removed(s.cfg.Containerd.RemoveImage(ctx, ref))
}

func removed(err error) error {
	failpoint.Reach("images/removed")
	return err
}

// Untag removes an image, unless it was used after a time, and leaves its content to Collect. It reports whether it did.
func (s *Store) Untag(ctx context.Context, ref string, unusedSince time.Time) (bool, error) {
	s.mu.Lock()
	used := s.used[ref]
	s.mu.Unlock()
	if used.After(unusedSince) {
		return false, nil
	}
	err := removed(s.cfg.Containerd.UntagImage(ctx, ref))
	return err == nil, err
}

// Collect frees the space of removed images.
func (s *Store) Collect(ctx context.Context) error { return s.cfg.Containerd.Collect(ctx) }

// flight is a pull that others may wait for.
type flight struct {
	ref    string
	done   chan struct{}
	cancel context.CancelFunc
	// img and err are set before done is closed.
	img ctrd.Image
	err error
	// waiters is guarded by Store.mu.
	waiters int

	mu      sync.Mutex
	last    ctrd.Progress                // +checklocks:mu
	reports map[*Ask]func(ctrd.Progress) // +checklocks:mu
}

// share joins a running pull, or begins one. It ends when the last of those that wait has gone.
func (s *Store) share(ctx context.Context, key string, ask *Ask, do func(context.Context, func(ctrd.Progress)) (ctrd.Image, error)) (ctrd.Image, error) {
	s.mu.Lock()
	f := s.flights[key]
	begins := f == nil
	running := ctx
	if begins {
		f = &flight{ref: ask.Ref, done: make(chan struct{}), reports: map[*Ask]func(ctrd.Progress){}}
		running, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
		s.flights[key] = f
	}
	f.waiters++
	s.mu.Unlock()
	f.listen(ask)
	if begins {
		go func() { // ends with its last waiter
			f.img, f.err = do(running, f.report)
			s.mu.Lock()
			if s.flights[key] == f {
				delete(s.flights, key)
			}
			s.mu.Unlock()
			f.cancel()
			close(f.done)
		}()
	}
	select {
	case <-f.done:
		return f.img, f.err
	case <-ctx.Done():
	}
	s.mu.Lock()
	f.waiters--
	last := f.waiters == 0
	if last && s.flights[key] == f {
		delete(s.flights, key)
	}
	s.mu.Unlock()
	f.unlisten(ask)
	if last {
		f.cancel()
		<-f.done
	}
	return ctrd.Image{}, fmt.Errorf("wait for the pull: %w: %w", context.Cause(ctx), cmp.Or(errs.Kind(ctx.Err()), errs.ErrUnavailable))
}

func (f *flight) listen(ask *Ask) {
	f.mu.Lock()
	last := f.last
	if ask.Progress != nil {
		f.reports[ask] = ask.Progress
	}
	f.mu.Unlock()
	if ask.Progress != nil && last.Step != "" {
		ask.Progress(last)
	}
}

func (f *flight) unlisten(ask *Ask) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.reports, ask)
}

func (f *flight) report(p ctrd.Progress) {
	f.mu.Lock()
	f.last = p
	all := make([]func(ctrd.Progress), 0, len(f.reports))
	for _, r := range f.reports {
		all = append(all, r)
	}
	f.mu.Unlock()
	for _, r := range all {
		r(p)
	}
}
