package apiserver

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	pkiDir         = "pki"
	tokenFile      = "admin.token"
	kubeconfigFile = "admin.kubeconfig"
)

// adminToken returns the configured token, or the one kept in dir, which it makes if missing.
func adminToken(configured, dir string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	path := filepath.Join(dir, tokenFile)
	text, err := os.ReadFile(path)
	if err == nil {
		token := strings.TrimSpace(string(text))
		if len(token) < minTokenLength {
			return "", fmt.Errorf("admin token in %s: %w: too short (delete the file to have a new one made)", path, errs.ErrInvalid)
		}
		return token, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read admin token: %w", err)
	}
	token := rand.Text() + rand.Text()
	return token, durable.WriteFile(path, []byte(token+"\n"), 0o600)
}

// writeKubeconfig writes the admin's kubeconfig for a server at addr.
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

// reachable replaces an address that means all interfaces by one that can be dialled.
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

// certificateNames is for whom the server's certificate must speak, beside localhost.
func certificateNames(cfg *Config) []string {
	names := slices.Clone(cfg.PublicNames)
	for _, ip := range cfg.PublicIPs {
		names = append(names, ip.String())
	}
	host, _, err := net.SplitHostPort(cfg.Listen)
	if ip := net.ParseIP(host); err != nil || host == "" || (ip != nil && ip.IsUnspecified()) {
		return names
	}
	return append(names, host)
}
