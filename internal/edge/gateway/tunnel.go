package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/gateway/confine"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/framing"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/edge/gateway/server"
)

// tunnel copies bytes both ways after the sandbox accepted an upgrade.
func (x *exchange) tunnel(c *endpoint.Conn, res *http.Response) error {
	both, ok := res.Body.(io.ReadWriter)
	if !ok || c == nil || x.r.ProtoMajor != 1 || !strings.EqualFold(res.Header.Get("Upgrade"), x.r.Header.Get("Upgrade")) || headers.UpgradeOf(x.r, x.Port) == "" {
		return errMalformed
	}
	if !x.body.IsWhole() { // the rest of the body must be read first (RFC 9110, 7.8)
		return errMalformed
	}
	client, ahead, err := server.Hijack(x.rc, x.r)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // both sides have ended by then
	x.status = res.StatusCode
	head := &http.Response{StatusCode: res.StatusCode, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}}
	headers.CopyResponse(head.Header, res.Header)
	confine.Response(&x.Target, x.r.Header, head.Header)
	head.Header.Set("Connection", "Upgrade")
	head.Header.Set("Upgrade", res.Header.Get("Upgrade"))
	out := bufio.NewWriter(client)
	if err := head.Write(out); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	x.firstByte = time.Since(x.started)
	x.g.metrics.firstByte.Observe(x.firstByte.Seconds())
	x.join(client, ahead, c, both)
	return nil
}

// join copies bytes both ways until both sides have ended, or one has broken.
func (x *exchange) join(client net.Conn, ahead []byte, c *endpoint.Conn, from io.Reader) {
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := pour(c.Conn, x.quiet.Reading(client), ahead); err != nil || c.CloseWrite() != nil {
			_ = c.Close()
			return
		}
		_ = c.SetReadDeadline(time.Now().Add(tunnelLinger)) // a failure shows in the other direction
	})
	n, err := pour(client, x.quiet.Reading(from), nil)
	x.bytes = n
	if err != nil || c.EpochEnded() || framing.CloseWrite(client) != nil {
		_ = client.Close() // which unblocks the other direction
		_ = c.Close()
	} else {
		_ = client.SetReadDeadline(time.Now().Add(tunnelLinger)) // the sandbox has sent everything
	}
	wg.Wait()
}

// tunnelLinger is how long one side may continue to send after the other has closed its own.
const tunnelLinger = time.Minute

// pour copies ahead, the bytes already read of src, and then src to dst.
func pour(dst io.Writer, src io.Reader, ahead []byte) (int64, error) {
	m, err := dst.Write(ahead)
	if err != nil {
		return int64(m), fmt.Errorf("carry tunnel: %w", err)
	}
	n, err := io.Copy(dst, src)
	return int64(m) + n, err
}
