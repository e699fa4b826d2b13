package picker

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// rivalTTL is how long after its last claim a process counts as one that claims.
const rivalTTL = 10 * time.Minute

// rivals are the other processes that claim members of the same pools, as their claims show. By
// rendezvous hashing each member has an order of the processes: they prefer different members, and agree on that without a
// request to each other. A process that does not know of another yet, or has too few members of its own, takes the
// other's; the conditional write decides, as always.
type rivals struct {
	self string
	seen map[string]time.Time // the last claim, by identity
}

// note records when another process claimed, and reports whether the process is a new one.
func (r *rivals) note(identity string, at time.Time) (changed bool) {
	if identity == "" || identity == r.self || r.self == "" {
		return false
	}
	last, known := r.seen[identity]
	if at.After(last) {
		r.seen[identity] = at
	}
	return !known
}

// expire forgets processes that claim no more, and reports whether there are any.
func (r *rivals) expire(now time.Time) (changed bool) {
	before := len(r.seen)
	maps.DeleteFunc(r.seen, func(_ string, last time.Time) bool { return now.Sub(last) > rivalTTL })
	return len(r.seen) != before
}

// rank is the number of processes that come before this one for a member.
func (r *rivals) rank(member types.UID) (n int) {
	if len(r.seen) == 0 {
		return 0
	}
	own := weight(r.self, member)
	for other := range r.seen {
		if w := weight(other, member); w > own || w == own && other > r.self {
			n++
		}
	}
	return n
}

// weight is the same in every process.
func weight(identity string, member types.UID) uint64 {
	sum := sha256.Sum256([]byte(identity + "/" + string(member)))
	return binary.BigEndian.Uint64(sum[:])
}
