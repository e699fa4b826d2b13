package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const testDomain = "sandboxes.test"

// certificateFiles are those that an operator would give a server: issued by another authority.
func certificateFiles(t *testing.T, dir string) (cert, key string, roots *x509.CertPool) {
	t.Helper()
	issue := func(template, parent *x509.Certificate, signer *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if signer == nil {
			parent, signer = template, own
		}
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &own.PublicKey, signer)
		if err != nil {
			t.Fatal(err)
		}
		c, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return c, own
	}
	from, until := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	ca, caKey := issue(&x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "an authority"}, NotBefore: from, NotAfter: until,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, nil)
	leaf, leafKey := issue(&x509.Certificate{
		SerialNumber: big.NewInt(4711), Subject: pkix.Name{CommonName: testDomain}, NotBefore: from, NotAfter: until,
		DNSNames: []string{testDomain, "*." + testDomain}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, ca, caKey)
	keyDER, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: leaf.Raw}, key: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	roots = x509.NewCertPool()
	roots.AddCert(ca)
	return cert, key, roots
}

// tlsClient connects to the server for any host name, and trusts only roots.
func (s *server) tlsClient(roots *x509.CertPool) *http.Client {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, s.tls)
		},
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true,
	}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// query makes one request; mod may change it.
func query(t *testing.T, c *http.Client, url string, mod func(*http.Request)) (*http.Response, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if mod != nil {
		mod(req)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatalf("GET %s: %v", url, err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("GET %s: %v", url, err)
	}
	return resp, string(b)
}

// testGateway is what traffic to sandboxes meets on both listeners.
func testGateway(t *testing.T, s *server, roots *x509.CertPool) {
	host := startRegistry(t)
	push(t, host+"/gate:1", helloImage(t, helloProgram(t), "gate"))
	s.apply(imageTemplate("gate", host+"/gate:1", ""))
	id := s.create(s.localKey(), "gate")
	t.Cleanup(func() { s.call(s.localKey(), http.MethodDelete, "/sandboxes/"+id, nil) })
	s.untilServed(id, "/")
	url := fmt.Sprintf("https://8080-%s.%s", id, testDomain)

	t.Run("HTTP/2 by the operator's certificate", func(t *testing.T) {
		resp, body := query(t, s.in(t).tlsClient(roots), url+"/", nil)
		if resp.StatusCode != http.StatusOK || resp.ProtoMajor != 2 || resp.TLS.PeerCertificates[0].SerialNumber.Int64() != 4711 {
			t.Errorf("%s by %s, certificate %v", resp.Status, resp.Proto, resp.TLS.PeerCertificates[0].SerialNumber)
		}
		if want := fmt.Sprintf("host=8080-%s.%s ", id, testDomain); !strings.Contains(body, want) {
			t.Errorf("the service returned %q, want %q", body, want)
		}
		api, text := query(t, s.in(t).tlsClient(roots), "https://api."+testDomain+"/sandboxes/"+id, func(r *http.Request) { r.Header.Set("X-API-Key", s.localKey()) })
		if api.StatusCode != http.StatusOK || !strings.Contains(text, id) {
			t.Errorf("the API over TLS: %s %s", api.Status, text)
		}
	})
	t.Run("env --tls names no authority of ours", func(t *testing.T) {
		if env := strings.Join(s.in(t).clientEnv("--tls"), "\n"); strings.Contains(env, "NODE_EXTRA_CA_CERTS="+s.dir) || !strings.Contains(env, "E2B_DOMAIN="+testDomain) {
			t.Errorf("env --tls:\n%s", env)
		}
	})
	t.Run("WebSocket", func(t *testing.T) {
		for name, dial := range map[string]func(ctx context.Context) (*websocket.Conn, *http.Response, error){
			"TLS": func(ctx context.Context) (*websocket.Conn, *http.Response, error) {
				return websocket.Dial(ctx, url+"/echo", &websocket.DialOptions{HTTPClient: s.in(t).tlsClient(roots)})
			},
			"plain": func(ctx context.Context) (*websocket.Conn, *http.Response, error) {
				return websocket.Dial(ctx, "ws://"+s.http+"/echo", &websocket.DialOptions{Host: fmt.Sprintf("8080-%s.%s", id, testDomain)})
			},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
			defer cancel()
			c, _, err := dial(ctx) // no body after an upgrade
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			for i := range 3 {
				text := fmt.Sprintf("message %d", i)
				if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if _, got, err := c.Read(ctx); err != nil || string(got) != "echo "+text {
					t.Errorf("%s: got %q, %v", name, got, err)
				}
			}
			_ = c.Close(websocket.StatusNormalClosure, "")
		}
	})
	t.Run("refusals", func(t *testing.T) { testGatewayRefusals(t, s.in(t), id) })
	t.Run("a kill cuts streams", func(t *testing.T) { testKillCuts(t, s.in(t)) })
}

func testGatewayRefusals(t *testing.T, s *server, id string) {
	const unknown = "i0000000000000000000"
	paused := s.create(s.localKey(), "gate")
	t.Cleanup(func() { s.call(s.localKey(), http.MethodDelete, "/sandboxes/"+paused, nil) })
	s.must("pause", paused)
	for name, give := range map[string]struct {
		host   string
		path   string
		status int
		body   string
	}{
		"a closed port":     {"9999-" + id, "/", 502, `{"sandboxId":"` + id + `","message":"The sandbox is running but port is not open","port":9999,"code":502}`},
		"no such sandbox":   {"8080-" + unknown, "/", 502, `{"sandboxId":"` + unknown + `","message":"The sandbox was not found","code":502}`},
		"a paused sandbox":  {"8080-" + paused, "/", 502, `{"sandboxId":"` + paused + `","message":"The sandbox was not found","code":502}`},
		"internal routes":   {"49983-" + id, "/init", 404, `{"message":"The path does not exist","path":"/init","code":404}`},
		"a port of letters": {"http-" + id, "/", 400, "invalid port: want a number from 1 to 65535\n"},
		"a short ID":        {"8080-i123", "/", 400, "invalid sandbox ID: want 20 lower-case letters and digits\n"},
		"no token":          {"49983-" + id, "/files?path=/etc/passwd", 401, ""},
	} {
		resp, body := query(t, http.DefaultClient, "http://"+s.http+give.path, func(r *http.Request) { r.Host = give.host + "." + testDomain })
		if resp.StatusCode != give.status || (give.body != "" && body != give.body) {
			t.Errorf("%s: %d %q\nwant %d %q", name, resp.StatusCode, body, give.status, give.body)
		}
	}
	resp, body := query(t, http.DefaultClient, "http://"+s.http+"/", func(r *http.Request) {
		r.Host = "9999-" + id + "." + testDomain
		r.Header.Set("User-Agent", "Mozilla/5.0 (X11; Linux x86_64)")
		r.Header.Set("Accept", "text/html,*/*")
	})
	if resp.StatusCode != http.StatusBadGateway || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") || !strings.Contains(body, "port is not open") {
		t.Errorf("a browser gets %s, %s:\n%s", resp.Status, resp.Header.Get("Content-Type"), body)
	}
}

// testKillCuts verifies that a stream breaks without a clean end, and later requests are rejected.
func testKillCuts(t *testing.T, s *server) {
	id := s.create(s.localKey(), "gate")
	s.untilServed(id, "/")
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.http+"/drip", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = fmt.Sprintf("8080-%s.%s", id, testDomain)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.ReadFull(resp.Body, make([]byte, len("drop 0\ndrop 1\n"))); err != nil {
		t.Fatalf("the stream does not flow: %v", err)
	}
	if status, body := s.call(s.localKey(), http.MethodDelete, "/sandboxes/"+id, nil); status != http.StatusNoContent {
		t.Fatalf("DELETE = %d %s", status, body)
	}
	// The kill has been answered: from now on the sandbox is unreachable.
	want := `{"sandboxId":"` + id + `","message":"The sandbox was not found","code":502}`
	if status, body, err := s.visit(id, 8080, "/"); err != nil || status != http.StatusBadGateway || body != want {
		t.Errorf("after the kill: %d %s %v\nwant 502 %s", status, body, err, want)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err == nil || ctx.Err() != nil {
		t.Errorf("the stream ended with %v, want it to break off", err)
	}
}
