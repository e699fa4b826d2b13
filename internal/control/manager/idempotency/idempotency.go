// Package idempotency ties a sandbox to the request that created it, so that a repeated request gets the same
// sandbox. It creates and finds none: the caller does, and verifies here that a sandbox is the request's. It holds no
// lock while it calls.
package idempotency

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// AnnotationBody is the hash of the request of a sandbox, beside [pool.AnnotationIdempotencyKey].
const AnnotationBody = "barchan.dev/idempotency-body"

// maxKey is in bytes.
const maxKey = 255

// ErrKeyReused reports a key that another request, whose sandbox is not dead, has used.
var ErrKeyReused = fmt.Errorf("the idempotency key belongs to another request: %w", errs.ErrInvalid)

func keyReused() error {
	return apistatus.Refuse(ErrKeyReused, "Idempotency-Key: was used for a different request; send another key")
}

// CheckKey refuses an invalid key; an empty one is valid.
func CheckKey(key string) error {
	bad := strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' })
	if bad || len(key) > maxKey {
		return apistatus.Refuse(errs.ErrInvalid, "Idempotency-Key: must have from 1 to %d printable ASCII characters", maxKey)
	}
	return nil
}

// Hasher hashes with a secret: keys and bodies can be guessed, and everyone who reads a sandbox sees its annotations and name.
type Hasher struct{ secret []byte }

// NewHasher takes the secret that all replicas of the server have.
func NewHasher(tokens *sandbox.Tokens) (Hasher, error) {
	secret, err := tokens.Derive("idempotency")
	return Hasher{secret}, err
}

// Digest identifies a request by the hashes of its key and of its body. Zero is a request without a key.
type Digest struct{ Key, Body, name string }

// Of returns the digest of a request of a namespace.
func (h Hasher) Of(namespace, key string, request any) (Digest, error) {
	body, err := json.Marshal(request) // sorts the keys of maps
	if err != nil {
		return Digest{}, fmt.Errorf("hash the request: %w", err)
	}
	return Digest{Key: h.hash("key", namespace, key), Body: h.hash("body", namespace, string(body)), name: h.hash("name", namespace, key)}, nil
}

// hash needs no lengths: neither a purpose nor a namespace has a zero byte.
func (h Hasher) hash(purpose, namespace, text string) string {
	mac := hmac.New(sha256.New, h.secret)
	mac.Write([]byte(purpose + "\x00" + namespace + "\x00" + text))
	return hex.EncodeToString(mac.Sum(nil))
}

// Name is the name of a request's cold-started sandbox, so that replicas create only one. Each try has its own,
// because a dead sandbox may still have the name before.
func (d Digest) Name(try int) string {
	sum := sha256.Sum256([]byte(d.name + "/" + strconv.Itoa(try)))
	return "once-" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:15]))
}

// Mark annotates a sandbox as the request's.
func (d Digest) Mark(s *agents.Sandbox) {
	if d != (Digest{}) {
		s.Annotations[pool.AnnotationIdempotencyKey], s.Annotations[AnnotationBody] = d.Key, d.Body
	}
}

// Made reports whether a sandbox is the request's and not dead. The sandbox of another request with the same key
// is an ErrKeyReused.
func (d Digest) Made(s *agents.Sandbox) (bool, error) {
	switch {
	case sandbox.DeadForGood(s) || pool.MemberOf(s) != "" || s.Annotations[pool.AnnotationIdempotencyKey] != d.Key:
		return false, nil
	case s.Annotations[AnnotationBody] != d.Body:
		return false, keyReused()
	}
	return true, nil
}

// Group joins the requests of this process that have the same key and are in progress. It is not x/sync/singleflight,
// which cannot refuse another request's body at once. Its zero value is ready.
type Group struct {
	mu sync.Mutex
	// +checklocks:mu
	flights map[flightKey]*flight
}

type flightKey struct{ namespace, key string }

// flight is a create in progress; made and err are set before done is closed.
type flight struct {
	body string
	done chan struct{}
	made *agents.Sandbox
	err  error
}

// Do calls create, or waits until ctx ends for the call of the same request and returns its result. Another request
// with the same key is an ErrKeyReused.
func (g *Group) Do(ctx context.Context, namespace string, d Digest, create func() (*agents.Sandbox, error)) (*agents.Sandbox, error) {
	at := flightKey{namespace, d.Key}
	g.mu.Lock()
	f, joined := g.flights[at]
	if !joined {
		if g.flights == nil {
			g.flights = map[flightKey]*flight{}
		}
		f = &flight{body: d.Body, done: make(chan struct{}), err: errs.ErrUnavailable}
		g.flights[at] = f
	}
	g.mu.Unlock()
	if joined {
		if f.body != d.Body {
			return nil, keyReused()
		}
		select {
		case <-f.done:
			return f.made, f.err
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the same request: %w: %w", errs.ErrTimeout, ctx.Err())
		}
	}
	defer func() {
		g.mu.Lock()
		delete(g.flights, at)
		g.mu.Unlock()
		close(f.done)
	}()
	f.made, f.err = create()
	return f.made, f.err
}
