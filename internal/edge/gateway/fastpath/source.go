package fastpath

import (
	"errors"
	"io"
	"net"
	"syscall"
)

// source reads a connection, and holds a buffer only when there is data to read. One goroutine uses
// it.
type source struct {
	nc  net.Conn
	raw syscall.RawConn // nil: a buffer is needed all the time

	space func() []byte // returns the buffer to read into
	spare func()        // called when the buffer is not needed for now
	try   func(fd uintptr) (done bool)
	n     int
	err   error
}

func newSource(nc net.Conn, space func() []byte, spare func()) *source {
	s := &source{nc: nc, space: space, spare: spare}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			s.raw, s.try = raw, s.tryRead
		}
	}
	return s
}

// read reads from the connection into the buffer of space.
func (s *source) read() (int, error) {
	if s.raw == nil {
		return s.nc.Read(s.space())
	}
	s.n, s.err = 0, nil
	if err := s.raw.Read(s.try); err != nil {
		return 0, err
	}
	return s.n, s.err
}

func (s *source) tryRead(fd uintptr) (done bool) {
	for {
		s.n, s.err = syscall.Read(int(fd), s.space())
		switch {
		case errors.Is(s.err, syscall.EINTR):
			continue
		case errors.Is(s.err, syscall.EAGAIN):
			s.n = 0
			s.spare()
			return false
		case s.err != nil:
			s.n = 0
		case s.n == 0:
			s.err = io.EOF
		}
		return true
	}
}
