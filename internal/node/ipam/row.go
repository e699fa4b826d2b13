package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unicode/utf8"
)

// rowVersion is the version of rows in subnet buckets. Rows without a version are in the flat
// bucket; see [MigrateFlat].
const rowVersion = 1

// Row is one row of a Store: an address as text, and its value.
type Row struct {
	// Subnet is the prefix of the row's bucket. An unreadable row may have any text.
	Subnet     string
	Key, Value []byte
}

// Store keeps rows durably, by subnet and key.
type Store interface {
	// Each visits all rows, grouped by subnet. A row is valid during its visit only.
	Each(visit func(Row) error) error
	// Apply makes the changes in order, all or none, and returns when they are durable. A nil Value
	// deletes the row if it exists.
	Apply(changes ...Row) error
}

type stored struct {
	Version int        `json:"version,omitempty"`
	Address netip.Addr `json:"address"`
	Owner   string     `json:"owner,omitempty"`
	State   State      `json:"state"`
	Since   time.Time  `json:"since"`
	Reason  string     `json:"reason,omitempty"`
}

func encode(l Lease) (value []byte, err error) {
	value, err = json.Marshal(stored{rowVersion, l.Address, l.Owner, l.State, l.Since, l.Reason})
	if err != nil {
		return nil, fmt.Errorf("encode lease of %s: %w", l.Address, err)
	}
	return value, nil
}

// decode reads a row of the version; its key is the address as text.
func decode(key, value []byte, version int) (Lease, error) {
	var s stored
	if !utf8.Valid(value) {
		return Lease{}, errors.New("decode lease: not UTF-8")
	}
	if err := json.Unmarshal(value, &s); err != nil {
		return Lease{}, fmt.Errorf("decode lease: %w", err)
	}
	owned := s.State == Reserved || s.State == Held
	switch {
	case s.Version != version:
		return Lease{}, fmt.Errorf("decode lease: version %d, want %d", s.Version, version)
	case !s.Address.Is4() || s.Address.String() != string(key):
		return Lease{}, fmt.Errorf("decode lease: address %s under key %q", s.Address, key)
	case !owned && s.State != Quarantined && s.State != Cooling:
		return Lease{}, fmt.Errorf("decode lease: unknown state %q", s.State)
	case owned != (s.Owner != ""):
		return Lease{}, fmt.Errorf("decode lease: state %s with owner %q", s.State, s.Owner)
	}
	return Lease{Address: s.Address, Owner: s.Owner, State: s.State, Since: s.Since, Reason: s.Reason}, nil
}

// addressOf returns the address that a key is, in canonical form.
func addressOf(key []byte) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(string(key))
	return addr, err == nil && addr.Is4() && addr.String() == string(key)
}
