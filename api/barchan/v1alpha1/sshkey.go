package v1alpha1

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Limits of an APIKey's SSH keys: their number, and bytes of each.
const (
	MaxSSHKeys   = 32
	maxSSHKeyLen = 4096
)

// sshKeyTypes are those that SSH servers accept today; certificates, DSA and 1024-bit keys are not.
var sshKeyTypes = []string{
	"ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa",
	"sk-ssh-ed25519@openssh.com", "sk-ecdsa-sha2-nistp256@openssh.com",
}

// minRSABlob is the size of an RSA key of 2048 bits: its type, an exponent of three bytes, and the modulus.
const minRSABlob = 4 + 7 + 4 + 3 + 4 + 1 + 2048/8

// SSHFingerprint returns the fingerprint of a public key, as ssh-keygen prints it (SHA256:…). The text is a line of
// authorized_keys without options. The error says what is wrong with it, and does not repeat it.
func SSHFingerprint(text string) (string, error) {
	if len(text) > maxSSHKeyLen || strings.ContainsAny(text, "\r\n\x00") {
		return "", fmt.Errorf("must be one line of at most %d bytes", maxSSHKeyLen)
	}
	fields := strings.Fields(text)
	if len(fields) < 2 || !slices.Contains(sshKeyTypes, fields[0]) {
		return "", errors.New("must be a public key: its type (" + strings.Join(sshKeyTypes, ", ") + "), its base64, and optionally a comment")
	}
	blob, err := base64.StdEncoding.DecodeString(fields[1])
	n := uint64(len(fields[0]))
	if err != nil || len(blob) < 4 || uint64(binary.BigEndian.Uint32(blob)) != n || !strings.HasPrefix(string(blob[4:]), fields[0]) {
		return "", fmt.Errorf("must have a %s key in base64 after its type", fields[0])
	}
	if fields[0] == "ssh-rsa" && len(blob) < minRSABlob {
		return "", errors.New("must have at least 2048 bits, as an RSA key")
	}
	sum := sha256.Sum256(blob)
	return "SHA256:" + base64.RawStdEncoding.EncodeToString(sum[:]), nil
}

// SSHComment returns the comment of a public key, or empty.
func SSHComment(text string) string {
	if fields := strings.Fields(text); len(fields) > 2 {
		return strings.Join(fields[2:], " ")
	}
	return ""
}
