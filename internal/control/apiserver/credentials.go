package apiserver

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	pkiDir         = "pki"
	minTokenLength = 16
)

// credentials are the files of a user that reaches the server over its listener.
type credentials struct{ user, tokenFile, kubeconfig string }

var (
	adminCredentials = credentials{UserAdmin, "admin.token", "admin.kubeconfig"}
	nodeCredentials  = credentials{UserNode, "node.token", "node.kubeconfig"}
)

func (s *Server) credentials() []credentials {
	if s.cfg.Node {
		return []credentials{adminCredentials, nodeCredentials}
	}
	return []credentials{adminCredentials}
}

// loadToken returns the bearer token of a file, which it creates if missing.
func loadToken(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err == nil {
		token := strings.TrimSpace(string(text))
		if len(token) < minTokenLength {
			return "", fmt.Errorf("token in %s: %w: too short; delete the file to create a new one", path, errs.ErrInvalid)
		}
		return token, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read token: %w", err)
	}
	token := rand.Text() + rand.Text()
	return token, durable.WriteFile(path, []byte(token+"\n"), 0o600)
}

// writeKubeconfig writes a user's kubeconfig for a server at addr.
func writeKubeconfig(path string, addr net.Addr, ca []byte, token string) error {
	const name = "barchan"
	k := clientcmdapi.NewConfig()
	k.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + reachable(addr.String()), CertificateAuthorityData: ca}
	k.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: token}
	k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: "default"}
	k.CurrentContext = name
	data, err := clientcmd.Write(*k)
	if err != nil {
		return fmt.Errorf("encode kubeconfig: %w", err)
	}
	return durable.WriteFile(path, data, 0o600)
}

// reachable replaces an unspecified address by loopback, which clients can dial.
func reachable(hostport string) string {
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		return hostport
	}
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// certificateNames returns the names in the server's certificate, beside localhost.
func certificateNames(listen string) []string {
	host, _, err := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); err != nil || host == "" || (ip != nil && ip.IsUnspecified()) {
		return nil
	}
	return []string{host}
}
