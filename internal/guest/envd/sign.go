package envd

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"hash"
	"strconv"
	"strings"
	"time"
)

// Operation is what a signature allows.
type Operation string

// The operations of file URLs.
const (
	OpRead  Operation = "read"
	OpWrite Operation = "write"
)

// Query parameters of a signed file URL.
const (
	QueryPath       = "path"
	QueryUsername   = "username"
	QuerySignature  = "signature"
	QueryExpiration = "signature_expiration" // Unix seconds
)

// Reasons to refuse a signature. Their texts are the protocol's.
var (
	ErrSignatureMissing = errors.New("missing signature query parameter")
	ErrSignatureInvalid = errors.New("invalid signature")
	ErrSignatureExpired = errors.New("signature is already expired")
)

// Sign allows op on one file to a bearer of the result. path and user are
// as in the URL, unresolved; user may be empty. Without an expiry it
// holds as long as the token.
func Sign(path string, op Operation, user, token string, expiry *time.Time) string {
	parts := []string{path, string(op), user, token}
	if expiry != nil {
		parts = append(parts, strconv.FormatInt(expiry.Unix(), 10))
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, ":")))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// Verify checks what Sign made, at the time now. It does not reveal the
// expected signature, in its error or by the time it takes.
func Verify(signature, path string, op Operation, user, token string, expiry *time.Time, now time.Time) error {
	if signature == "" {
		return ErrSignatureMissing
	}
	return NewSignature(signature, path, op, user, expiry).Verify(token, now)
}

// Signature is one that is to be verified with many tokens: the work for each does not depend on the path's length.
type Signature struct {
	text   []byte
	before hash.Cloner // of what is in front of the token
	after  string
	expiry *time.Time
}

// NewSignature takes what Sign took, but for the token, and its result.
func NewSignature(signature, path string, op Operation, user string, expiry *time.Time) *Signature {
	s := &Signature{text: []byte(signature), before: sha256.New().(hash.Cloner), expiry: expiry} //nolint:forcetypeassert // see hash.Cloner
	s.before.Write([]byte(path + ":" + string(op) + ":" + user + ":"))
	if expiry != nil {
		s.after = ":" + strconv.FormatInt(expiry.Unix(), 10)
	}
	return s
}

// Verify checks the signature with a token, as the function of that name.
func (s *Signature) Verify(token string, now time.Time) error {
	sum, err := s.before.Clone()
	if err != nil {
		return err
	}
	sum.Write([]byte(token + s.after))
	want := "v1_" + base64.RawStdEncoding.EncodeToString(sum.Sum(nil))
	if token == "" || subtle.ConstantTimeCompare([]byte(want), s.text) != 1 {
		return ErrSignatureInvalid
	}
	if s.expiry != nil && s.expiry.Unix() < now.Unix() {
		return ErrSignatureExpired
	}
	return nil
}
