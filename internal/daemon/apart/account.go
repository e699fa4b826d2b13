package apart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/config"
)

const (
	kubeconfigName = "node.kubeconfig"
	secretName     = "token-secret"
	accountPoll    = 20 * time.Millisecond
	// maxAccount bounds each file of the account, in bytes.
	maxAccount = 64 << 10
)

// accountDir has the node's account: root's copies of what the server's process wrote.
func accountDir(dataDir string) string { return filepath.Join(dataDir, "node-account") }

// copyAccount waits for the node's account, which the server's process makes at its first start, and copies it.
func copyAccount(ctx context.Context, cfg config.Config) error {
	dir := accountDir(cfg.DataDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	server := serverConfig(cfg)
	secretDir := filepath.Dir(server.TokenSecret)
	for _, part := range []struct {
		dir, name, to string
		check         func([]byte) ([]byte, error)
	}{
		{secretDir, filepath.Base(server.TokenSecret), secretName, func(b []byte) ([]byte, error) { return b, nil }},
		{filepath.Dir(server.NodeKubeconfig()), kubeconfigName, kubeconfigName, func(b []byte) ([]byte, error) { return plainKubeconfig(b, cfg.KubeAddr) }},
	} {
		content, err := awaitFile(ctx, part.dir, part.name)
		if err == nil {
			content, err = part.check(content)
		}
		if err == nil {
			err = durable.WriteFile(filepath.Join(dir, part.to), content, 0o600)
		}
		if err != nil {
			return fmt.Errorf("read the node's account: %s: %w", part.name, err)
		}
	}
	return nil
}

func awaitFile(ctx context.Context, dir, name string) ([]byte, error) {
	for {
		b, err := readOnly(dir, name)
		if !errors.Is(err, fs.ErrNotExist) {
			return b, err
		}
		if !lifecycle.Sleep(ctx, accountPoll) {
			return nil, context.Cause(ctx)
		}
	}
}

// readOnly reads a regular file that another user may replace meanwhile; a link out of the directory is refused.
func readOnly(dir, name string) ([]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: %w", filepath.Join(dir, name), errs.ErrForbidden)
	}
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxAccount+1))
	if err == nil && len(b) > maxAccount {
		err = fmt.Errorf("%s is too large: %w", filepath.Join(dir, name), errs.ErrForbidden)
	}
	return b, err
}

// plainKubeconfig returns a kubeconfig with the authority and the token of another, and nothing else of it: a kubeconfig can name
// programs to run and files to send.
func plainKubeconfig(b []byte, kubeAddr string) ([]byte, error) {
	in, err := clientcmd.Load(b)
	if err != nil {
		return nil, fmt.Errorf("parse: %w", err)
	}
	var token string
	var authority []byte
	if c := in.Contexts[in.CurrentContext]; c != nil {
		if a := in.AuthInfos[c.AuthInfo]; a != nil {
			token = a.Token
		}
		if a := in.Clusters[c.Cluster]; a != nil {
			authority = a.CertificateAuthorityData
		}
	}
	if token == "" || len(authority) == 0 {
		return nil, fmt.Errorf("it has no token or no authority: %w", errs.ErrInvalid)
	}
	host, port, err := net.SplitHostPort(kubeAddr)
	if err != nil {
		return nil, fmt.Errorf("kubeAddr: %w", err)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	const name = "barchan"
	out := clientcmdapi.NewConfig()
	out.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + net.JoinHostPort(host, port), CertificateAuthorityData: authority}
	out.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: token}
	out.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: "default"}
	out.CurrentContext = name
	return clientcmd.Write(*out)
}
