package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// inFlight puts something into one end and, at the next check, reads it from the other.
func inFlight(name string, put io.Writer, get io.Reader) (func() error, error) {
	const text = "on its way"
	if _, err := io.WriteString(put, text); err != nil {
		return nil, err
	}
	return func() error {
		b := make([]byte, len(text))
		if err := within(name, func() error {
			_, err := io.ReadFull(get, b)
			return err
		}); err != nil {
			return err
		}
		if string(b) != text {
			return fmt.Errorf("%s: %q came", name, b)
		}
		_, err := io.WriteString(put, text)
		return err
	}, nil
}

// listening serves connections of a listener by an echo, and checks an old and a new one.
func listening(network, address string) (func() error, error) {
	ln, err := net.Listen(network, address)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c) }()
		}
	}()
	old, err := net.Dial(network, ln.Addr().String())
	if err != nil {
		return nil, err
	}
	there, err := inFlight(network+": the old connection", old, old)
	if err != nil {
		return nil, err
	}
	return all(there, func() error {
		c, err := net.DialTimeout(network, ln.Addr().String(), patience)
		if err != nil {
			return fmt.Errorf("a new connection: %w", err)
		}
		defer func() { _ = c.Close() }()
		again, err := inFlight(network+": a new connection", c, c)
		if err != nil {
			return err
		}
		return again()
	}), nil
}

func tcpLoopback() (func() error, error) { return listening("tcp", "127.0.0.1:0") }

// unixSockets are a pair, a listener with a name, and datagrams.
func unixSockets() (func() error, error) {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, err
	}
	pair, err := inFlight("pair", os.NewFile(uintptr(ends[0]), "a"), os.NewFile(uintptr(ends[1]), "b"))
	if err != nil {
		return nil, err
	}
	stream, err := listening("unix", "/tmp/canary.sock")
	if err != nil {
		return nil, err
	}
	abstract, err := listening("unix", "@canary")
	if err != nil {
		return nil, err
	}
	grams, err := datagrams("unixgram", "/tmp/canary.gram")
	if err != nil {
		return nil, err
	}
	return all(pair, stream, abstract, grams), nil
}

func udpLoopback() (func() error, error) { return datagrams("udp", "127.0.0.1:8081") }

// datagrams lie unread at a socket with a name.
func datagrams(network, address string) (func() error, error) {
	at, err := net.ListenPacket(network, address)
	if err != nil {
		return nil, err
	}
	from, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	const many = 3
	send := func() error {
		for i := range many {
			if _, err := from.Write(bytes.Repeat([]byte{byte(i)}, 100+i)); err != nil {
				return err
			}
		}
		return nil
	}
	return func() error {
		b := make([]byte, 1000)
		for i := range many {
			if err := at.SetReadDeadline(time.Now().Add(patience)); err != nil {
				return err
			}
			n, _, err := at.ReadFrom(b)
			if err != nil || n != 100+i || b[0] != byte(i) {
				return fmt.Errorf("%s %d: %d bytes of %d, %v", network, i, n, b[0], err) //nolint:errorlint // there may be none
			}
		}
		return send()
	}, send()
}

// netlinkSocket queries the kernel for its links.
func netlinkSocket() (func() error, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	return func() error {
		request := []byte{17, 0, 0, 0, unix.RTM_GETLINK, 0, unix.NLM_F_REQUEST | unix.NLM_F_DUMP&0xff, unix.NLM_F_DUMP >> 8, 1, 0, 0, 0, 0, 0, 0, 0, unix.AF_UNSPEC}
		if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		b := make([]byte, 1<<16)
		return within("answer", func() error {
			n, _, err := unix.Recvfrom(fd, b, 0)
			if err == nil && n < unix.NLMSG_HDRLEN {
				err = fmt.Errorf("%d bytes", n)
			}
			for err == nil && b[4] != unix.NLMSG_DONE { // the rest of the dump
				if n, _, err = unix.Recvfrom(fd, b, unix.MSG_DONTWAIT); n <= 0 {
					return nil //nolint:nilerr // there is no more
				}
			}
			return err
		})
	}, nil
}
