package peers

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"os"
	"testing"

	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
)

func copyFile(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o600)
}

func writePair(t *testing.T, to trust.Source, pair *tls.Certificate) {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{
		to.CertFile: {Type: "CERTIFICATE", Bytes: pair.Certificate[0]},
		to.KeyFile:  {Type: "PRIVATE KEY", Bytes: der},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
