// Package signedurl signs URLs that give access to one port of a private sandbox for a limited
// time. The CLI signs; the gateway verifies. The package holds no keys and cannot revoke a URL.
package signedurl

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strconv"
	"time"
)

// Parameters of the query. The gateway removes both before the sandbox sees the request.
const (
	QuerySignature = "barchan_signature"
	QueryExpires   = "barchan_expires" // Unix seconds
)

// version is the first part of every signature.
const version = "v1_"

// Query returns the query that gives access to a port until expires: any path, any method.
// token is the sandbox's traffic token.
func Query(token string, port uint16, expires time.Time) url.Values {
	at := strconv.FormatInt(expires.Unix(), 10)
	return url.Values{QueryExpires: {at}, QuerySignature: {sign(token, port, at)}}
}

// Verify checks a signature and returns when it expires. ok is false if it does not match or has expired.
func Verify(token string, port uint16, expires, signature string) (until time.Time, ok bool) {
	if !hmac.Equal([]byte(signature), []byte(sign(token, port, expires))) {
		return time.Time{}, false
	}
	seconds, err := strconv.ParseInt(expires, 10, 64) // signed by the token's owner, but maybe not a number
	until = time.Unix(seconds, 0)
	return until, err == nil && time.Now().Before(until)
}

// sign returns an HMAC-SHA256, keyed with the token, over the purpose, the port and the expiry.
func sign(token string, port uint16, expires string) string {
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte("url\x00" + strconv.Itoa(int(port)) + "\x00" + expires))
	return version + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
