package localca

import (
	"crypto/tls"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// checkEvery is the minimum interval between checks of the files.
const checkEvery = 2 * time.Second

// Files is a certificate that is renewed externally in its files. Make it with OpenFiles.
type Files struct {
	certPath string
	keyPath  string
	log      *slog.Logger

	mu      sync.Mutex
	pair    *tls.Certificate // +checklocks:mu
	stamp   [2]fileStamp     // +checklocks:mu
	checked time.Time        // +checklocks:mu
}

type fileStamp struct {
	modified time.Time
	size     int64
}

// OpenFiles loads a certificate chain and its key, in PEM. Later changes of the files take effect
// within seconds; while they do not match, the last valid pair is served.
func OpenFiles(certPath, keyPath string, log *slog.Logger) (*Files, error) {
	f := &Files{certPath: certPath, keyPath: keyPath, log: log.With(telemetry.Component, "certificates"), checked: time.Now()}
	stamp, err := f.look()
	if err != nil {
		return nil, err
	}
	f.stamp = stamp
	if f.pair, err = f.load(); err != nil {
		return nil, err
	}
	return f, nil
}

// TLSConfig returns a server's configuration for HTTP/2 and HTTP/1.1.
func (f *Files) TLSConfig() *tls.Config {
	return serverConfig(func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) { return f.current(hello), nil })
}

func (f *Files) current(hello *tls.ClientHelloInfo) *tls.Certificate {
	f.mu.Lock()
	if time.Since(f.checked) < checkEvery {
		defer f.mu.Unlock()
		return f.pair
	}
	f.checked = time.Now()
	pair, stamp := f.pair, f.stamp
	f.mu.Unlock()

	now, err := f.look()
	if err == nil && now == stamp {
		return pair
	}
	var fresh *tls.Certificate
	if err == nil {
		fresh, err = f.load()
	}
	if err != nil {
		f.log.WarnContext(hello.Context(), "new certificate cannot be used, the old one serves on", telemetry.Path, f.certPath, telemetry.Error, err)
		return pair
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pair, f.stamp = fresh, now
	f.log.InfoContext(hello.Context(), "certificate reloaded", telemetry.Path, f.certPath, "expires", fresh.Leaf.NotAfter)
	return fresh
}

func (f *Files) look() (stamp [2]fileStamp, err error) {
	for i, path := range []string{f.certPath, f.keyPath} {
		var info fs.FileInfo
		if info, err = os.Stat(path); err != nil {
			return stamp, fmt.Errorf("look at certificate file: %w", err)
		}
		stamp[i] = fileStamp{info.ModTime(), info.Size()}
	}
	return stamp, nil
}

func (f *Files) load() (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(f.certPath, f.keyPath)
	if err != nil {
		return nil, fmt.Errorf("load certificate %s with key %s: %w", f.certPath, f.keyPath, err)
	}
	return &pair, nil
}
