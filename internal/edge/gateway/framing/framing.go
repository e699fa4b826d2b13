// Package framing finds where HTTP/1 messages end on a connection, and rejects those that parsers read differently. It reads framing only; net/http
// parses the messages.
package framing

import (
	"bytes"
	"errors"
	"net"
	"strconv"

	"golang.org/x/net/http/httpguts"
)

// ErrAmbiguous means that a message is ambiguous. The server of net/http answers it with 400 and
// closes the connection.
var ErrAmbiguous = errors.New("message can be read in two ways")

// place is the parser's state.
type place int

const (
	atStart    place = iota // before the first line
	inHead                  // after it
	inBody                  // of a known length
	atSize                  // before a chunk
	inChunk                 //
	afterChunk              // before its line end
	inTrailer
	afterPreface // of HTTP/2: before the first of prefaceLines, and so on
	passing      = afterPreface + place(len(prefaceLines))
	ended        = passing + 1 // nothing may follow
)

// Preface is the first line of an HTTP/2 connection (RFC 9113, 3.4).
const Preface = "PRI * HTTP/2.0"

// prefaceLines are the lines after preface, each without its line feed.
var prefaceLines = [...]string{"\r", "SM\r", "\r"}

// Parser parses the bytes that go to net/http, which silently accepts input that other parsers read
// differently: a length beside a chunked encoding, folded lines, and lines that end without a carriage
// return. It finds where each message ends and which bytes must not be passed on. Each connection and
// direction has its own.
//
// Of a sandbox's responses it checks only the heads, and accepts net/http's line endings: the gateway
// rewrites them for the client. But their framing must be unambiguous.
type Parser struct {
	response bool
	h2       bool // the connection may be HTTP/2

	at      place
	partial []byte // of a line
	skip    int64  // bytes of a body or chunk
	length  int64  // as the head says; -1: it does not
	encoded bool   // it has a transfer encoding
	chunked bool   // and it is chunked
	current bool   // HTTP/1.1
	interim bool   // of a response: 1xx
}

// NewRequests returns the parser of a client's connection, which may be HTTP/2.
func NewRequests() Parser { return Parser{h2: true} }

// NewResponses returns the parser of a sandbox's connection.
func NewResponses() Parser { return Parser{response: true} }

// RefuseHTTP2 makes an HTTP/2 preface an ambiguous message.
func (m *Parser) RefuseHTTP2() { m.h2 = false }

// IsInterim reports whether the last head was that of an interim response.
func (m *Parser) IsInterim() bool { return m.interim }

// Over reports whether nothing may follow.
func (m *Parser) Over() bool { return m.at == ended && m.skip == 0 }

// Pending reports whether bytes may be passed on without being parsed: of a body, or for the answer to a refused message.
func (m *Parser) Pending() bool { return m.skip > 0 }

// Fresh reports whether nothing of the next message has been read.
func (m *Parser) Fresh() bool { return m.at == atStart && len(m.partial) == 0 }

// Take parses the next bytes and returns how many may be passed on: up to the end of the message, if
// that is in b. ok is false if b[n] must not be passed on; this is permanent.
func (m *Parser) Take(b []byte) (n int, ok bool) {
	for n < len(b) {
		switch {
		case m.at == passing:
			return len(b), true
		case m.skip > 0:
			n += m.pass(len(b) - n)
			if m.at == atStart {
				return n, true
			}
			continue
		case m.at == ended:
			return n, false
		}
		end := bytes.IndexByte(b[n:], '\n')
		if end < 0 {
			m.partial = append(m.partial, b[n:]...)
			return len(b), true
		}
		line := b[n : n+end]
		fresh := m.Fresh()
		if len(m.partial) > 0 {
			m.partial = append(m.partial, line...)
			line = m.partial
		}
		was := m.at
		whole := m.line(line)
		m.partial = m.partial[:0]
		if !whole {
			if !m.refuse(was, fresh && end == 0, int64(end)) {
				return n + end, false
			}
			continue
		}
		n += end + 1
		if m.at == atStart && was != atStart {
			return n, true
		}
	}
	return n, true
}

// pass passes on up to n of the body bytes to skip.
func (m *Parser) pass(n int) int {
	k := min(m.skip, int64(n))
	m.skip -= k
	switch {
	case m.skip > 0:
	case m.at == inBody:
		m.at = atStart
	case m.at == inChunk:
		m.at = afterChunk
	}
	return int(k)
}

// refuse ends the connection's messages at a line of a length, and reports whether part of it is
// passed on, so that net/http answers.
func (m *Parser) refuse(was place, first bool, length int64) bool {
	m.at = ended
	switch {
	case was == atSize || was == afterChunk:
		m.skip = length + 1 // net/http rejects it, too, and with the right response
		return true
	case first:
		m.skip = 4 // net/http waits for 4 bytes before it parses a request; they cannot hold one
		return true
	case was == inTrailer:
		m.skip = int64(len(BrokenTrailer))
	}
	return false
}

// BrokenTrailer replaces the rest of ambiguous trailers with unambiguously invalid ones: a connection
// error would end their request without a response.
const BrokenTrailer = "\x00\r\n\r\n"

// line parses a line without its line feed, and reports whether it is unambiguous in its place.
func (m *Parser) line(line []byte) bool {
	if m.response {
		return m.responseLine(bytes.TrimSuffix(line, []byte("\r")))
	}
	if m.at >= afterPreface {
		want := prefaceLines[m.at-afterPreface]
		m.at++
		return string(line) == want
	}
	text, whole := bytes.CutSuffix(line, []byte("\r"))
	if !whole || (m.at != atSize && !printable(text)) {
		return false
	}
	switch m.at {
	case atStart:
		return m.requestLine(text)
	case inHead, inTrailer:
		if len(text) == 0 {
			return m.endFields()
		}
		name, value, ok := bytes.Cut(text, []byte(":"))
		return ok && token(name) && (m.at == inTrailer || m.frame(name, value))
	case atSize:
		return m.chunkSize(text)
	case afterChunk:
		m.at = atSize
		return len(text) == 0
	case inBody, inChunk, afterPreface, passing, ended: // not read by lines
	}
	return false
}

func (m *Parser) requestLine(text []byte) bool {
	if string(text) == Preface {
		m.at = afterPreface
		return m.h2
	}
	m.h2 = false
	if len(text) > 0 { // a line end may stand before a request (RFC 9112, 2.2)
		m.begin(bytes.HasSuffix(text, []byte(" HTTP/1.1")))
	}
	return true
}

func (m *Parser) begin(current bool) {
	m.at, m.length, m.encoded, m.chunked, m.current = inHead, -1, false, false, current
}

func (m *Parser) responseLine(text []byte) bool {
	switch {
	case m.at == atStart:
		m.begin(true)
		_, status, _ := bytes.Cut(text, []byte(" "))
		m.interim = bytes.HasPrefix(status, []byte("1")) && !bytes.HasPrefix(status, []byte("101"))
	case len(text) == 0:
		m.at = atStart
	default:
		name, value, _ := bytes.Cut(text, []byte(":"))
		return m.frame(bytes.TrimRight(name, " \t"), value)
	}
	return true
}

// frame parses a header, and reports whether the message still has one length.
func (m *Parser) frame(name, value []byte) bool {
	switch {
	case bytes.EqualFold(name, []byte("Content-Length")):
		n, err := strconv.ParseUint(string(bytes.Trim(value, " \t")), 10, 63)
		same := m.length < 0 || m.length == int64(n) //nolint:gosec // 63 bits
		m.length = int64(n)                          //nolint:gosec // 63 bits
		return err == nil && same && !m.encoded
	case bytes.EqualFold(name, []byte("Transfer-Encoding")):
		again := m.encoded
		m.encoded = true
		m.chunked = bytes.EqualFold(bytes.Trim(value, " \t"), []byte("chunked"))
		return !again && m.length < 0 && m.current
	}
	return true
}

// endFields handles the end of a head or of trailers.
func (m *Parser) endFields() bool {
	switch {
	case m.at == inTrailer:
		m.at = atStart
	case m.chunked:
		m.at = atSize
	case m.encoded:
		m.at = ended // net/http rejects it with 501
	case m.length > 0:
		m.at, m.skip = inBody, m.length
	default:
		m.at = atStart
	}
	return true
}

func (m *Parser) chunkSize(text []byte) bool {
	size, _, _ := bytes.Cut(text, []byte(";"))
	n, err := strconv.ParseUint(string(bytes.TrimRight(size, " \t")), 16, 60)
	if err != nil {
		return false
	}
	m.at, m.skip = inChunk, int64(n) //nolint:gosec // 60 bits
	if n == 0 {
		m.at = inTrailer
	}
	return true
}

// printable reports whether a line has no control characters but tabs.
func printable(line []byte) bool {
	for _, c := range line {
		if (c < ' ' && c != '\t') || c == 0x7f {
			return false
		}
	}
	return true
}

// token reports whether a text may be a header's name.
func token(name []byte) bool {
	for _, c := range name {
		if !httpguts.IsTokenRune(rune(c)) {
			return false
		}
	}
	return len(name) > 0
}

// CloseWrite closes the sending side of a connection, or all of it where that is not possible.
func CloseWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}
