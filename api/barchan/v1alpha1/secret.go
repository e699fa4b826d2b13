package v1alpha1

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"

	corev1 "k8s.io/api/core/v1"
)

// The form of an API key: KeyPrefix and 40 hex digits, as E2B's clients expect, of which
// the first digits are stored in clear for people to recognise it.
const (
	KeyPrefix = "e2b_"
	// KeyDigits is how many characters come after KeyPrefix.
	KeyDigits   = 40
	shownDigits = 6
)

// NewKeySecret makes up the text of a key, with 160 random bits.
func NewKeySecret() string {
	var random [KeyDigits / 2]byte
	_, _ = rand.Read(random[:]) // never fails, by its contract
	return KeyPrefix + hex.EncodeToString(random[:])
}

// HashKey is what a key is looked up by: its SHA-256 in hex.
func HashKey(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// NewAPIKeySpec is what is stored of a key that NewKeySecret made.
func NewAPIKeySpec(secret, description string) APIKeySpec {
	return APIKeySpec{Description: description, SHA256: HashKey(secret), Prefix: secret[:len(KeyPrefix)+shownDigits]}
}

// WebhookSecretType is the type of the Secrets that are webhooks, LabelWebhook their label.
const (
	WebhookSecretType corev1.SecretType = "barchan.dev/webhook"
	LabelWebhook      string            = "barchan.dev/webhook"
)

// IsWebhook reports whether a Secret is a webhook.
func IsWebhook(s *corev1.Secret) bool {
	_, labelled := s.Labels[LabelWebhook]
	return labelled && s.Type == WebhookSecretType
}
