// Package signedurl signs URLs that give access to one port of a private sandbox for a limited
// time, and those of uploads. The CLI signs the former; the gateway verifies. The package holds no keys
// and cannot revoke a URL.
package signedurl

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strconv"
	"strings"
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
	return url.Values{QueryExpires: {at}, QuerySignature: {signPort(token, port, at)}}
}

// Verify checks a signature and returns when it expires. ok is false if it does not match or has expired.
func Verify(token string, port uint16, expires, signature string) (until time.Time, ok bool) {
	if !hmac.Equal([]byte(signature), []byte(signPort(token, port, expires))) {
		return time.Time{}, false
	}
	return valid(expires)
}

// valid parses an expiry whose signature is right: signed by the key's owner, but maybe not a number.
func valid(expires string) (until time.Time, ok bool) {
	seconds, err := strconv.ParseInt(expires, 10, 64)
	until = time.Unix(seconds, 0)
	return until, err == nil && time.Now().Before(until)
}

// PurposeUploads is what the key of uploads is derived for, from the server's secret.
const PurposeUploads = "barchan template uploads"

// Upload returns the end of the path of a URL by which one archive of a namespace can be uploaded until expires. No part may
// have a slash.
func Upload(key []byte, namespace, hash string, expires time.Time) string {
	at := strconv.FormatInt(expires.Unix(), 10)
	return strings.Join([]string{namespace, hash, at, sign(key, "upload", namespace, hash, at)}, "/")
}

// VerifyUpload checks the end of such a path, and returns what may be uploaded by it. ok is false if the signature does not
// match or has expired.
func VerifyUpload(key []byte, path string) (namespace, hash string, ok bool) {
	parts := strings.Split(path, "/")
	if len(parts) != 4 || !hmac.Equal([]byte(parts[3]), []byte(sign(key, "upload", parts[:3]...))) {
		return "", "", false
	}
	_, ok = valid(parts[2])
	return parts[0], parts[1], ok
}

func signPort(token string, port uint16, expires string) string {
	return sign([]byte(token), "url", strconv.Itoa(int(port)), expires)
}

// sign returns an HMAC-SHA256 over the purpose and the fields.
func sign(key []byte, purpose string, fields ...string) string {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(purpose + "\x00" + strings.Join(fields, "\x00")))
	return version + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
