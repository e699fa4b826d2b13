package envd

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
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

// Verify checks what Sign made, at the time now. It does not check the
// expected signature, in its error or by the time it takes.
func Verify(signature, path string, op Operation, user, token string, expiry *time.Time, now time.Time) error {
	if signature == "" {
		return ErrSignatureMissing
	}
	want := Sign(path, op, user, token, expiry)
	if token == "" || subtle.ConstantTimeCompare([]byte(want), []byte(signature)) != 1 {
		return ErrSignatureInvalid
	}
	if expiry != nil && expiry.Unix() < now.Unix() {
		return ErrSignatureExpired
	}
	return nil
}
