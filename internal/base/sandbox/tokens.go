package sandbox

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// minSecret is the least length of a minting secret, in bytes.
const minSecret = 32

// Tokens derives the access tokens of sandboxes from one secret of the server: HMAC-SHA256 over
// purpose and sandbox ID. They need no storage, stay valid over restarts and resumes, and look random
// without the secret.
type Tokens struct{ secret []byte }

// NewTokens takes the server's secret, at least 32 bytes.
func NewTokens(secret []byte) (*Tokens, error) {
	if len(secret) < minSecret {
		return nil, fmt.Errorf("token secret has %d bytes, want at least %d: %w", len(secret), minSecret, errs.ErrInvalid)
	}
	return &Tokens{secret: append([]byte(nil), secret...)}, nil
}

// Derive returns 32 bytes for another purpose of the server, by HKDF-SHA256 (RFC 5869) with the purpose as info. They reveal neither
// the secret nor any token.
func (t *Tokens) Derive(purpose string) ([]byte, error) {
	key, err := hkdf.Key(sha256.New, t.secret, nil, purpose, sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("derive key of %s: %w", purpose, err)
	}
	return key, nil
}

// Agent returns the token that a secure sandbox's agent requires.
func (t *Tokens) Agent(id ID) string { return t.mint("agent", id) }

// Traffic returns the token that the gateway requires unless traffic is public.
func (t *Tokens) Traffic(id ID) string { return t.mint("traffic", id) }

func (t *Tokens) mint(purpose string, id ID) string {
	mac := hmac.New(sha256.New, t.secret)
	mac.Write([]byte(purpose + "\x00" + string(id)))
	return hex.EncodeToString(mac.Sum(nil))
}

// EqualToken compares two tokens in constant time.
func EqualToken(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }
