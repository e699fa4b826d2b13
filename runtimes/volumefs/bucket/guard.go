package bucket

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

// What SOCKS 5 (RFC 1928) has of what is needed here.
const (
	socksVersion  = 5
	socksConnect  = 1
	socksIPv4     = 1
	socksName     = 3
	socksIPv6     = 4
	replyFailed   = 1
	replyRefused  = 2
	replyNoAnswer = 4
	// socksRefused is how net/http reports replyRefused.
	socksRefused = "connection not allowed by ruleset"
)

// guard starts a proxy on the loopback through which every connection of the backend goes, also those of redirects. It connects to no
// denied address, and to nothing but the endpoint: the addresses of its name are checked as they are dialled.
func guard(endpoint *url.URL, denied []netip.Prefix) (string, error) {
	port := endpoint.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[endpoint.Scheme]
	}
	only := net.JoinHostPort(endpoint.Hostname(), port)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("listen for own connections: %w", err)
	}
	dialer := &net.Dialer{Timeout: backend.ConnectTimeout, Control: func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		ip := to.Addr().Unmap()
		if slices.ContainsFunc(denied, func(p netip.Prefix) bool { return p.Contains(ip.WithZone("")) }) {
			return backend.ErrRefused
		}
		return nil
	}}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go relay(conn, dialer, only)
		}
	}()
	return "socks5://" + listener.Addr().String(), nil
}

func relay(conn net.Conn, dialer *net.Dialer, only string) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	target, err := readConnect(in, conn)
	if err != nil {
		return
	}
	var to net.Conn
	if err = backend.ErrRefused; strings.EqualFold(target, only) {
		to, err = dialer.Dial("tcp", target)
	}
	code := byte(0)
	switch {
	case errors.Is(err, backend.ErrRefused):
		code = replyRefused
	case err != nil:
		code = replyNoAnswer
	}
	if _, failed := conn.Write([]byte{socksVersion, code, 0, socksIPv4, 0, 0, 0, 0, 0, 0}); failed != nil || err != nil {
		if to != nil {
			_ = to.Close()
		}
		return
	}
	defer to.Close()
	go func() {
		_, _ = io.Copy(to, in)
		if half, ok := to.(*net.TCPConn); ok {
			_ = half.CloseWrite()
		}
	}()
	_, _ = io.Copy(conn, to)
}

// readConnect reads a request to connect, and returns its target.
func readConnect(in *bufio.Reader, out io.Writer) (string, error) {
	head := make([]byte, 2)
	if _, err := io.ReadFull(in, head); err != nil {
		return "", err
	}
	if _, err := in.Discard(int(head[1])); err != nil {
		return "", err
	}
	if _, err := out.Write([]byte{socksVersion, 0}); err != nil {
		return "", err
	}
	request := make([]byte, 4)
	if _, err := io.ReadFull(in, request); err != nil {
		return "", err
	}
	length := 0
	switch request[3] {
	case socksIPv4:
		length = net.IPv4len
	case socksIPv6:
		length = net.IPv6len
	case socksName:
		n, err := in.ReadByte()
		if err != nil {
			return "", err
		}
		length = int(n)
	}
	if request[1] != socksConnect || length == 0 {
		_, err := out.Write([]byte{socksVersion, replyFailed, 0, socksIPv4, 0, 0, 0, 0, 0, 0})
		return "", errors.Join(err, errors.New("no such request"))
	}
	rest := make([]byte, length+2)
	if _, err := io.ReadFull(in, rest); err != nil {
		return "", err
	}
	host := string(rest[:length])
	if request[3] != socksName {
		host = net.IP(rest[:length]).String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(rest[length:])))), nil
}
