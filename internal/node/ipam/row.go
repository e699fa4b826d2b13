package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unicode/utf8"
)

// rowVersion is the version of the rows that this code writes. Rows of before there were
// versions have none, and are not in the same place; see [MigrateFlat].
const rowVersion = 1

// Row is one row of a Store: an address as text, and what is written of it.
type Row struct {
	// Subnet is the prefix that the row is filed under, as text. Of rows that nobody can read it
	// may be anything.
	Subnet     string
	Key, Value []byte
}

// Store keeps rows durably, by subnet and key.
type Store interface {
	// Each visits all rows, those of a subnet one after the other. What it passes is valid
	// during the visit only.
	Each(visit func(Row) error) error
	// Apply makes the changes in their order, all of them or none, and returns when they would
	// survive a power cut. A nil Value removes the row, if it is there.
	Apply(changes ...Row) error
}

// stored is a row's value.
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

// decode reads a row that must be of one version; its key is the address as text.
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

// addressOf reads a key that is an address as the books write it.
func addressOf(key []byte) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(string(key))
	return addr, err == nil && addr.Is4() && addr.String() == string(key)
}
