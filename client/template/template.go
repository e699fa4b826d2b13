// Package template builds templates by steps, as Template.build of E2B's SDKs, and moves their tags. It reads no Dockerfile, and packs no files.
package template

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/barchan-dev/barchan/client"
)

const (
	// pollEvery is the time between two reads of a build's status.
	pollEvery = 250 * time.Millisecond
	// patience is how long the server may be out of reach: a build goes on after a restart.
	patience = 2 * time.Minute
)

// Build makes a template whose steps copy no files, and returns once it is ready. log, which may be nil, gets the lines of the build. A build that fails is a
// [*Failure]. A build that ctx has ended is canceled.
func Build(ctx context.Context, c *client.Client, o Options, s Spec, log func(LogEntry)) (Info, error) {
	b, err := Request(ctx, c, o)
	if err == nil {
		err = Start(ctx, c, b, s)
	}
	if err != nil {
		return b, err
	}
	end, err := Follow(ctx, c, b, func(s *Status) {
		for i := 0; log != nil && i < len(s.LogEntries); i++ {
			log(s.LogEntries[i])
		}
	})
	if ctx.Err() != nil {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelWithin)
		defer cancel()
		_ = Cancel(late, c, b) // it may have ended
	}
	if err == nil && end.Status == StatusError {
		err = &Failure{Reason: end.Reason}
	}
	return b, err
}

// cancelWithin bounds the cancellation of a build.
const cancelWithin = 10 * time.Second

// Failure is a build that has failed.
type Failure struct{ Reason *Reason }

// Error returns the server's message, and the step.
func (e *Failure) Error() string {
	if e.Reason == nil {
		return "build: the server gives no reason"
	}
	return "build: step " + e.Reason.Step + ": " + e.Reason.Message
}

// Follow calls each for every part of a build's log, until the build has ended, and returns its last status.
func Follow(ctx context.Context, c *client.Client, b Info, each func(*Status)) (Status, error) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var end *Status
	reached := time.Now()
	for offset := 0; ; {
		status, err := ReadStatus(ctx, c, b, offset)
		switch {
		case err == nil:
			reached = time.Now()
			offset += len(status.LogEntries)
			each(&status)
			if end == nil && (status.Status == StatusReady || status.Status == StatusError) {
				end = &status
			}
			if len(status.LogEntries) > 0 { // there may be more
				continue
			}
			if end != nil {
				return *end, nil
			}
		case !errors.Is(err, client.ErrUnavailable) || time.Since(reached) > patience:
			return status, fmt.Errorf("follow build %s: %w", b.BuildID, err)
		}
		select {
		case <-ctx.Done():
			return status, ctx.Err()
		case <-tick.C:
		}
	}
}

// Exists reports whether a template has a name, which another namespace may have too.
func Exists(ctx context.Context, c *client.Client, name string) (bool, error) {
	err := c.Call(ctx, http.MethodGet, "/templates/aliases/"+url.PathEscape(name), nil, nil, nil)
	if errors.Is(err, client.ErrNotFound) {
		return false, nil
	}
	return err == nil || errors.Is(err, client.ErrForbidden), err
}

// AssignTags gives the build of a tag, such as "web:v1", more tags.
func AssignTags(ctx context.Context, c *client.Client, target string, tags ...string) error {
	return c.Call(ctx, http.MethodPost, "/templates/tags", nil, map[string]any{"target": target, "tags": tags}, nil)
}

// RemoveTags removes tags of a template.
func RemoveTags(ctx context.Context, c *client.Client, name string, tags ...string) error {
	return c.Call(ctx, http.MethodDelete, "/templates/tags", nil, map[string]any{"name": name, "tags": tags}, nil)
}

// Tags lists the tags of a template.
func Tags(ctx context.Context, c *client.Client, id string) ([]Tag, error) {
	return fetch[[]Tag](ctx, c, http.MethodGet, "/templates/"+url.PathEscape(id)+"/tags", nil)
}

// Tag is a tag with its build.
type Tag struct {
	Tag       string    `json:"tag"`
	BuildID   string    `json:"buildID"`
	CreatedAt time.Time `json:"createdAt"`
}

func fetch[T any](ctx context.Context, c *client.Client, method, path string, in any) (out T, err error) {
	return out, c.Call(ctx, method, path, nil, in, &out)
}
