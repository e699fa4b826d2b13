package sandbox

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// ID names a sandbox in hosts, URLs and routes: 20 lower-case letters and digits, the first always
// "i". It is derived from the object's UID, so that an object created again under the same name is
// another sandbox.
type ID string

const (
	idLength = 20
	idLead   = "i"
)

// IDOf derives the sandbox ID from an object's UID: "i" and the last 19 base-36 digits (98 bits) of the UID's SHA-256.
func IDOf(uid types.UID) ID {
	const divisor, digits = 4_738_381_338_321_616_896, 12 // 36 to the power of 12, the greatest that a word has room for
	sum := sha256.Sum256([]byte(uid))
	var number [sha256.Size / 8]uint64 // the most significant word first
	for i := range number {
		number[i] = binary.BigEndian.Uint64(sum[8*i:])
	}
	var id [idLength]byte
	var rest uint64
	for i := range idLength {
		if i%digits == 0 {
			rest = 0
			for j := range number {
				number[j], rest = bits.Div64(rest, number[j], divisor)
			}
		}
		id[idLength-1-i] = "0123456789abcdefghijklmnopqrstuvwxyz"[rest%36]
		rest /= 36
	}
	copy(id[:], idLead)
	return ID(id[:])
}

// VolumeIDOf derives a volume's ID from its object's UID, as IDOf does a sandbox's; the first character is always "v".
func VolumeIDOf(uid types.UID) string { return "v" + string(IDOf(uid)[len(idLead):]) }

// ParseID parses a sandbox ID as clients send it: the ID alone, or followed by "-" and an obsolete
// client ID, which is ignored. The error is an errs.ErrInvalid.
func ParseID(text string) (ID, error) {
	id, _, _ := strings.Cut(text, "-")
	if len(id) != idLength {
		return "", fmt.Errorf("sandbox ID %.40q: want %d lower-case letters and digits: %w", text, idLength, errs.ErrInvalid)
	}
	for _, c := range []byte(id) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return "", fmt.Errorf("sandbox ID %.40q: want only lower-case letters and digits: %w", text, errs.ErrInvalid)
		}
	}
	return ID(id), nil
}
