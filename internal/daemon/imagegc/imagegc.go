// Package imagegc keeps the images of a node within their share of the disk. It removes pulled images that nothing uses, the
// least recently used first, and never one that was imported or made here unless an operator asks for it.
//
// What uses an image is read from the API server and the node at each removal, never from a cache. It pulls nothing.
package imagegc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/images"
)

const (
	// every is how often the images are measured besides after pulls.
	every = 5 * time.Minute
	// settle is how long after a pull the images are measured, since others may follow.
	settle = time.Second
	// lowWater is the part of the limit, in percent, that a removal goes down to.
	lowWater = 90
)

// Store has the images; package images implements it.
type Store interface {
	List(ctx context.Context) ([]images.Info, error)
	Untag(ctx context.Context, ref string, unusedSince time.Time) (bool, error)
	Collect(ctx context.Context) error
}

// Node knows what was made from images, and their sizes.
type Node interface {
	ImageUsers(ctx context.Context, digest string) ([]sandbox.Ref, []sandbox.CheckpointRef, error)
}

// Sizes measures images; package ctrd implements it.
type Sizes interface {
	PartsOf(ctx context.Context, ref, digest string) (ctrd.Parts, error)
}

// Config configures New. All of it is required.
type Config struct {
	Store Store
	Node  Node
	Sizes Sizes
	// Objects reads from the API server.
	Objects client.Reader
	// Limit is the bytes that images may take; zero: any.
	Limit int64
	Log   *slog.Logger
}

// Collector removes images. It is safe for concurrent use.
type Collector struct {
	cfg  Config
	sem  chan struct{} // serializes removals
	kick chan struct{}
}

// New starts nothing.
func New(cfg Config) *Collector {
	cfg.Log = cfg.Log.With(telemetry.Component, "image-collector")
	return &Collector{cfg: cfg, sem: make(chan struct{}, 1), kick: make(chan struct{}, 1)}
}

// Pulled has the images measured soon.
func (c *Collector) Pulled() {
	select {
	case c.kick <- struct{}{}:
	default: // it is to happen already
	}
}

// Run keeps the limit until ctx is done.
func (c *Collector) Run(ctx context.Context) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	full := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.kick:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(settle):
			}
		case <-tick.C:
		}
		err := c.Room(ctx, 0)
		if err != nil && (!full || !errors.Is(err, errs.ErrExhausted)) && ctx.Err() == nil {
			c.cfg.Log.WarnContext(ctx, "images beyond their limit", telemetry.Error, err)
		}
		full = errors.Is(err, errs.ErrExhausted)
	}
}

// Room removes unused images until that many bytes fit into the limit. If they do not, it is an errs.ErrExhausted.
func (c *Collector) Room(ctx context.Context, bytes int64) error {
	if c.cfg.Limit == 0 {
		return nil
	}
	if err := c.begin(ctx); err != nil {
		return err
	}
	defer c.end()
	all, err := c.measure(ctx)
	if err != nil {
		return err
	}
	if all.total+bytes > c.cfg.Limit {
		_, err = c.remove(ctx, all, func(x *images.Info) bool { return x.Pulled }, c.cfg.Limit/100*lowWater-bytes)
	}
	if err == nil && all.total+bytes > c.cfg.Limit {
		err = fmt.Errorf("images take %d MiB of %d MiB (setting imageStore), and %d MiB more do not fit: the others are in use, or were imported; delete what uses them, or remove them with `barchan image prune --all`: %w",
			all.total>>20, c.cfg.Limit>>20, bytes>>20, errs.ErrExhausted)
	}
	return err
}

// Prune removes all unused images that were pulled; with all, also the others.
func (c *Collector) Prune(ctx context.Context, all bool) ([]images.Info, error) {
	if err := c.begin(ctx); err != nil {
		return nil, err
	}
	defer c.end()
	have, err := c.measure(ctx)
	if err != nil {
		return nil, err
	}
	return c.remove(ctx, have, func(x *images.Info) bool { return all || x.Pulled }, -1)
}

// UsersOf returns what would miss an image of a name; none if there is no such image.
func (c *Collector) UsersOf(ctx context.Context, ref string) (Users, error) {
	full, err := ctrd.Normalize(ref)
	if err != nil {
		return Users{}, err
	}
	list, err := c.cfg.Store.List(ctx)
	if err != nil {
		return Users{}, err
	}
	i := slices.IndexFunc(list, func(x images.Info) bool { return x.Ref == full })
	if i < 0 {
		return Users{}, nil // its removal returns that it does not exist
	}
	have, err := c.objects(ctx)
	if err != nil {
		return Users{}, err
	}
	return c.users(ctx, have, list, &list[i])
}

func (c *Collector) begin(ctx context.Context) error {
	select {
	case c.sem <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for a removal of images: %w: %w", ctx.Err(), errs.ErrUnavailable)
	}
}

func (c *Collector) end() { <-c.sem }

// stock is what there is.
type stock struct {
	images []images.Info
	parts  []ctrd.Parts // of the images
	// shared is how many images have a part.
	shared map[string]int
	total  int64
	at     time.Time
}

func (c *Collector) measure(ctx context.Context) (*stock, error) {
	s := &stock{shared: map[string]int{}, at: time.Now()}
	var err error
	if s.images, err = c.cfg.Store.List(ctx); err != nil {
		return nil, err
	}
	slices.SortFunc(s.images, func(a, b images.Info) int {
		return cmp.Or(a.LastUsed.Compare(b.LastUsed), cmp.Compare(a.Ref, b.Ref))
	})
	for i := range s.images {
		parts, err := c.cfg.Sizes.PartsOf(ctx, s.images[i].Ref, s.images[i].Digest)
		if err != nil && !errors.Is(err, errs.ErrNotFound) && !errors.Is(err, errs.ErrInvalid) {
			return nil, err
		}
		s.parts = append(s.parts, parts)
		for key, bytes := range parts {
			if s.shared[key]++; s.shared[key] == 1 {
				s.total += bytes
			}
		}
	}
	return s, nil
}

// drop takes an image's parts out of the total.
func (s *stock) drop(i int) {
	for key, bytes := range s.parts[i] {
		if s.shared[key]--; s.shared[key] == 0 {
			s.total -= bytes
		}
	}
}

func (c *Collector) objects(ctx context.Context) (*objects, error) {
	var boxes agents.SandboxList
	var templates extensions.SandboxTemplateList
	var builds barchan.TemplateBuildList
	for _, list := range []client.ObjectList{&boxes, &templates, &builds} {
		if err := c.cfg.Objects.List(ctx, list); err != nil {
			return nil, fmt.Errorf("list what uses images: %w", err)
		}
	}
	return &objects{sandboxes: boxes.Items, templates: templates.Items, builds: builds.Items}, nil
}

// users finds what would miss an image. What was made from it needs its content, which has other names perhaps; the rest goes
// by the name.
func (c *Collector) users(ctx context.Context, have *objects, list []images.Info, one *images.Info) (Users, error) {
	var made []sandbox.Ref
	var checkpoints []sandbox.CheckpointRef
	if !slices.ContainsFunc(list, func(x images.Info) bool { return x.Ref != one.Ref && x.Digest == one.Digest }) {
		var err error
		if made, checkpoints, err = c.cfg.Node.ImageUsers(ctx, one.Digest); err != nil {
			return Users{}, err
		}
	}
	return have.users(one.Ref, made, checkpoints), nil
}

// remove removes unused images that may go, until the total is down to a goal, and then frees the space of all at once.
func (c *Collector) remove(ctx context.Context, s *stock, may func(*images.Info) bool, goal int64) ([]images.Info, error) {
	removed, err := c.untag(ctx, s, may, goal)
	if len(removed) > 0 {
		err = errors.Join(err, c.cfg.Store.Collect(ctx))
	}
	return removed, err
}

func (c *Collector) untag(ctx context.Context, s *stock, may func(*images.Info) bool, goal int64) (removed []images.Info, err error) {
	have, err := c.objects(ctx)
	if err != nil {
		return nil, err
	}
	left := slices.Clone(s.images)
	for i := range s.images {
		x := &s.images[i]
		if s.total <= goal {
			break
		}
		if !may(x) || x.Pulling {
			continue
		}
		users, err := c.users(ctx, have, left, x)
		if err != nil {
			return removed, err
		}
		if !users.none() {
			continue
		}
		gone, err := c.cfg.Store.Untag(ctx, x.Ref, s.at)
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return removed, err
		}
		if !gone {
			continue
		}
		left = slices.DeleteFunc(left, func(y images.Info) bool { return y.Ref == x.Ref })
		s.drop(i)
		removed = append(removed, *x)
		c.cfg.Log.InfoContext(ctx, "unused image removed", telemetry.Image, x.Ref, "digest", x.Digest, "last_used", x.LastUsed)
	}
	return removed, nil
}
