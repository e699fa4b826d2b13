// Package push has what a replica sends to the others: routes, their wire format, and the queue of those to send.
package push

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Limits of a batch. A full batch of the longest routes fits into the body.
const (
	Version  = 1
	MaxBatch = 256     // routes
	MaxBody  = 1 << 20 // bytes

	MaxText     = 253 // of names, UIDs and hosts
	MaxEpochKey = 512
	MaxVersion  = 20 // digits: more than any API server's
)

// Route is a route, or its deletion.
type Route struct {
	route.Route
	// Deleted means that as of its ResourceVersion the sandbox is dead for good, or gone.
	Deleted bool
}

// Batch is the body of POST /refresh.
type Batch struct {
	Version int      `json:"v"`
	From    string   `json:"from"` // the name of the sender
	Boot    string   `json:"boot"` // boot ID of the sender's process
	To      string   `json:"to"`   // boot ID of the receiver's process
	Seq     uint64   `json:"seq"`
	Routes  []Record `json:"routes"`
}

// Record has the fields of route.Route one by one: a new field there is not sent until it is added
// here.
type Record struct {
	ID              sandbox.ID    `json:"id"`
	Namespace       string        `json:"ns"`
	Name            string        `json:"name"`
	UID             types.UID     `json:"uid"`
	State           sandbox.Phase `json:"state"`
	Address         netip.Addr    `json:"addr,omitzero"`
	Secure          bool          `json:"secure,omitempty"`
	PublicTraffic   bool          `json:"public,omitempty"`
	MaskRequestHost string        `json:"mask,omitempty"`
	WakeOnTraffic   bool          `json:"wake,omitempty"`
	WakeTimeout     time.Duration `json:"wakeFor,omitempty"` // nanoseconds
	IdleAfter       time.Duration `json:"idle,omitempty"`    // nanoseconds
	IdleShutdown    bool          `json:"idleEnds,omitempty"`
	Rate            int           `json:"rate,omitempty"` // requests a second
	EpochKey        string        `json:"life,omitempty"`
	ResourceVersion string        `json:"rv"`
	Deleted         bool          `json:"deleted,omitempty"`
}

// RecordOf returns the record of a route.
func RecordOf(r *Route) Record {
	return Record{
		ID: r.ID, Namespace: r.Namespace, Name: r.Name, UID: r.UID, State: r.State, Address: r.Address,
		Secure: r.Access.Secure, PublicTraffic: r.Access.PublicTraffic, MaskRequestHost: r.Access.MaskRequestHost,
		WakeOnTraffic: r.Wake.OnTraffic, WakeTimeout: r.Wake.Timeout, IdleAfter: r.Idle.After, IdleShutdown: r.Idle.Shutdown,
		Rate:     r.Access.RequestsPerSecond,
		EpochKey: r.EpochKey, ResourceVersion: r.ResourceVersion, Deleted: r.Deleted,
	}
}

// Route returns the route of a record.
func (w *Record) Route() Route {
	return Route{Deleted: w.Deleted, Route: route.Route{
		ID: w.ID, Namespace: w.Namespace, Name: w.Name, UID: w.UID, State: w.State, Address: w.Address.Unmap(),
		Access:   route.Access{Secure: w.Secure, PublicTraffic: w.PublicTraffic, MaskRequestHost: w.MaskRequestHost, RequestsPerSecond: w.Rate},
		Wake:     route.Wake{OnTraffic: w.WakeOnTraffic, Timeout: w.WakeTimeout},
		Idle:     route.Idle{After: w.IdleAfter, Shutdown: w.IdleShutdown},
		EpochKey: w.EpochKey, ResourceVersion: w.ResourceVersion,
	}}
}

// Check is called by sender and receiver, so that one bad route does not cost a batch its good ones.
func (w *Record) Check() error { //nolint:gocyclo // a table
	var bad string
	switch {
	case !WellFormed(w.ResourceVersion):
		bad = "rv"
	case w.UID == "" || !plain(string(w.UID), MaxText):
		bad = "uid"
	case w.ID != sandbox.IDOf(w.UID):
		bad = "id"
	case w.Namespace == "" || !plain(w.Namespace, MaxText):
		bad = "ns"
	case w.Name == "" || !plain(w.Name, MaxText):
		bad = "name"
	case !knownPhase(w.State):
		bad = "state"
	case w.Address.Zone() != "" || w.Address.IsMulticast() || w.Address.IsValid() && w.Address.IsUnspecified():
		bad = "addr"
	case !plain(w.MaskRequestHost, MaxText):
		bad = "mask"
	case w.WakeTimeout < 0:
		bad = "wakeFor"
	case w.IdleAfter < 0:
		bad = "idle"
	case w.Rate < 0:
		bad = "rate"
	case !plain(w.EpochKey, MaxEpochKey):
		bad = "life"
	default:
		return nil
	}
	return fmt.Errorf("route: %s is not as it must be: %w", bad, errs.ErrInvalid)
}

func knownPhase(p sandbox.Phase) bool {
	switch p {
	case sandbox.Pending, sandbox.Starting, sandbox.Running, sandbox.Pausing, sandbox.Paused,
		sandbox.Resuming, sandbox.Stopping, sandbox.Dead:
		return true
	default:
		return false
	}
}

// plain reports whether a text is printable ASCII that JSON need not escape, so that its length is its
// size in a body.
func plain(text string, longest int) bool {
	for _, c := range []byte(text) {
		if c <= ' ' || c > '~' || strings.IndexByte("\"\\<>&", c) >= 0 {
			return false
		}
	}
	return len(text) <= longest
}

// WellFormed reports whether a resource version can be compared.
func WellFormed(version string) bool {
	_, err := resourceversion.CompareResourceVersion(version, version)
	return err == nil && len(version) <= MaxVersion
}

// Supersedes reports whether a is newer than b about the same sandbox: it has a newer version, or it
// is the deletion as of the same version. Both versions are well formed.
func Supersedes(a, b *Route) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && (order > 0 || order == 0 && a.Deleted && !b.Deleted)
}

// ReadBatch reads a body of at most maxBody bytes. Errors are errs.ErrTooLarge or errs.ErrInvalid.
// Unknown fields are ignored, for later versions.
func ReadBatch(from io.Reader) (*Batch, error) {
	body, err := io.ReadAll(io.LimitReader(from, MaxBody+1))
	if err != nil {
		return nil, fmt.Errorf("read batch: %w: %w", err, errs.ErrInvalid)
	}
	if len(body) > MaxBody {
		return nil, fmt.Errorf("batch of more than %d bytes: %w", MaxBody, errs.ErrTooLarge)
	}
	b := &Batch{}
	dec := json.NewDecoder(bytes.NewReader(body))
	if err := dec.Decode(b); err != nil {
		return nil, fmt.Errorf("decode batch: %w: %w", err, errs.ErrInvalid)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("batch with something after it: %w", errs.ErrInvalid)
	}
	if b.Version != Version {
		return nil, fmt.Errorf("batch: v is %d, want %d: %w", b.Version, Version, errs.ErrInvalid)
	}
	return b, nil
}

// Take returns the routes of a batch if all of them are valid.
func (b *Batch) Take() ([]Route, error) {
	if len(b.Routes) > MaxBatch {
		return nil, fmt.Errorf("batch of %d routes, at most %d are taken: %w", len(b.Routes), MaxBatch, errs.ErrTooLarge)
	}
	routes := make([]Route, len(b.Routes))
	for i := range b.Routes {
		if err := b.Routes[i].Check(); err != nil {
			return nil, err
		}
		routes[i] = b.Routes[i].Route()
	}
	return routes, nil
}
