package envd

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/netip"
)

// PathIdentity has an agent prove which sandbox it is, before a client sends it anything on the same connection:
//
//	GET /internal/identity?nonce=<MinNonce to MaxNonce bytes, never used before>
//	200 {"proof":"<hex>","hashProof":"<hex>"}
//
// Both are HMAC-SHA256 over a purpose, the nonce, the sandbox's ID and the IP address at which the agent received
// the request, with a zero byte between. The address keeps a stranger from relaying the nonce to the sandbox at another
// address. The key of proof is the access token; the field is missing while the agent does not know the token. The
// key of hashProof is the token's SHA-256 ([TokenSHA256]), which anyone who may read a sandbox's Pod knows. An agent
// that knows neither returns 503. The request needs no token, and the response reveals nothing about it. It is our
// addition to the protocol.
const (
	PathIdentity = "/internal/identity"
	QueryNonce   = "nonce"
	MinNonce     = 16
	MaxNonce     = 64
)

const (
	purposeToken = "barchan.dev/identity/token"
	purposeHash  = "barchan.dev/identity/token-sha256"
)

// IdentityProof is the body of an agent's response.
type IdentityProof struct {
	Proof     string `json:"proof,omitempty"`
	HashProof string `json:"hashProof,omitempty"`
}

// ProveIdentity returns the response of the agent of a sandbox. addr is the address at which it received the nonce. hash is
// that of the token, for an agent that does not know the token. Empty without both.
func ProveIdentity(token, hash, nonce, id string, addr netip.Addr) (p IdentityProof) {
	if token != "" {
		p.Proof = prove(token, purposeToken, nonce, id, addr)
		hash = TokenSHA256(token)
	}
	if hash != "" {
		p.HashProof = prove(hash, purposeHash, nonce, id, addr)
	}
	return p
}

func prove(key, purpose, nonce, id string, addr netip.Addr) string {
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write([]byte(purpose + "\x00" + nonce + "\x00" + id + "\x00" + addr.String()))
	return hex.EncodeToString(mac.Sum(nil))
}

// AddrOf returns the IP address of one end of a connection, as proofs have it.
func AddrOf(end net.Addr) (netip.Addr, error) {
	ap, err := netip.ParseAddrPort(end.String())
	return ap.Addr().Unmap().WithZone(""), err
}
