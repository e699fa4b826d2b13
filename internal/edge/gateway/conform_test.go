package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// recorder is a service that keeps every byte that it is sent. It reads strictly, and answers
// what it could read.
type recorder struct {
	port   uint16
	answer string

	mu   sync.Mutex
	seen []string // +checklocks:mu
	bad  []error  // +checklocks:mu
}

const okAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// record runs a recorder that answers each request with the given bytes.
func record(t testing.TB, answer string) *recorder {
	t.Helper()
	s := &recorder{answer: answer}
	s.port = raw(t, s.serve)
	return s
}

// raw hands each connection to f in a goroutine of its own, and ends them all with the test.
func raw(t testing.TB, f func(net.Conn)) uint16 {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	open, over := map[net.Conn]bool{}, false
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[c] = true
			if over {
				_ = c.Close()
			}
			mu.Unlock()
			wg.Go(func() {
				f(c)
				_ = c.Close()
				mu.Lock()
				delete(open, c)
				mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		over = true
		for c := range open {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return portOf(t, l.Addr().String())
}

func (s *recorder) serve(c net.Conn) {
	kept := &bytes.Buffer{}
	in := bufio.NewReader(io.TeeReader(c, kept))
	for ; ; kept.Reset() {
		r, err := http.ReadRequest(in)
		if err == nil {
			_, err = io.Copy(io.Discard, r.Body)
		}
		if err == nil && in.Buffered() > 0 {
			err = errors.New("more came than one request")
		}
		if kept.Len() == 0 {
			return
		}
		s.mu.Lock()
		s.seen = append(s.seen, kept.String())
		if err != nil {
			s.bad = append(s.bad, err)
		}
		s.mu.Unlock()
		if err != nil {
			return
		}
		if _, err := io.WriteString(c, s.answer); err != nil {
			return
		}
	}
}

// requests returns what has come so far.
func (s *recorder) requests(t *testing.T) []string {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := errors.Join(s.bad...); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the sandbox was sent what is no request: %v", err)
	}
	return slices.Clone(s.seen)
}

// send opens a connection to the gateway, writes the bytes, and reads all answers until the
// gateway closes. Each request but the last must ask to keep the connection.
func (w *fixture) send(t testing.TB, text string) []string {
	t.Helper()
	c := w.connect(t)
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return answers(t, c)
}

func (w *fixture) connect(t testing.TB) *net.TCPConn {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(eventually.Patience)) // a gateway that hangs fails the test
	return c.(*net.TCPConn)
}

// answers reads responses up to the end: status and body of each.
func answers(t testing.TB, c net.Conn) []string {
	t.Helper()
	var all []string
	in := bufio.NewReader(c)
	for {
		if _, err := in.Peek(1); err != nil {
			if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
				t.Errorf("the gateway neither answers nor closes, after %q", all)
			}
			return all
		}
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatalf("after %q: %v", all, err)
		}
		body, err := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if err != nil {
			body = append(body, " (broken)"...)
		}
		all = append(all, fmt.Sprintf("%d %s", res.StatusCode, body))
	}
}

// checkRequest checks every byte that the gateway sends to a sandbox: that no
// reader, however lenient, finds another request in it.
func checkRequest(t testing.TB, text string) {
	t.Helper()
	head, _, ok := strings.Cut(text, "\r\n\r\n")
	if !ok {
		t.Errorf("no end of the head in %q", text)
		return
	}
	if strings.ContainsAny(strings.ReplaceAll(head, "\r\n", ""), "\r\n\x00") {
		t.Errorf("a bare line end or a zero in %q", head)
	}
	lines := strings.Split(head, "\r\n")
	if n := strings.Count(lines[0], " "); n != 2 || !strings.HasSuffix(lines[0], " HTTP/1.1") {
		t.Errorf("request line %q", lines[0])
	}
	count := map[string]int{}
	for _, line := range lines[1:] {
		name, value, ok := strings.Cut(line, ": ")
		if !ok || name == "" || strings.ContainsAny(name, " \t:\"(),/;<=>?@[\\]{}") || value != strings.TrimSpace(value) {
			t.Errorf("header line %q", line)
		}
		count[strings.ToLower(name)]++
		if strings.EqualFold(name, "Transfer-Encoding") && value != "chunked" {
			t.Errorf("transfer encoding %q", value)
		}
	}
	if count["host"] != 1 || count["content-length"]+count["transfer-encoding"] > 1 {
		t.Errorf("host, length or encoding too often in %q", head)
	}
}

// TestSmuggling sends what proxies and services have read differently. Either the request is
// refused and nothing reaches the sandbox, or the sandbox gets one reading of it, in plain form.
func TestSmuggling(t *testing.T) {
	const chunked, hidden = "Transfer-Encoding: chunked\r\n", "GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n"
	post := func(headers, body string) string {
		return "POST /x HTTP/1.1\r\nHost: HOST\r\n" + headers + "\r\n" + body
	}
	const last = "GET /last HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n"
	for name, c := range map[string]struct {
		send string
		want []int    // statuses
		seen []string // what the sandbox gets: method, path and body
	}{
		"plain":                      {post("Content-Length: 3\r\n", "abc") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"length and chunks":          {post("Content-Length: 6\r\n"+chunked, "0\r\n\r\n") + last, []int{400}, nil},
		"length and chunks, CL.TE":   {post("Content-Length: 40\r\n"+chunked, "1\r\na\r\n0\r\n\r\n") + last, []int{400}, nil},
		"two lengths":                {post("Content-Length: 3\r\nContent-Length: 36\r\n", "abc"+hidden), []int{400}, nil},
		"one length twice":           {post("Content-Length: 3\r\nContent-Length: 3\r\n", "abc") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"list of lengths":            {post("Content-Length: 3, 36\r\n", "abc"+hidden), []int{400}, nil},
		"signed length":              {post("Content-Length: +3\r\n", "abc"+hidden), []int{400}, nil},
		"negative length":            {post("Content-Length: -1\r\n", hidden), []int{400}, nil},
		"hexadecimal length":         {post("Content-Length: 0x3\r\n", "abc"+hidden), []int{400}, nil},
		"huge length":                {post("Content-Length: 99999999999999999999\r\n", hidden), []int{400}, nil},
		"empty length":               {post("Content-Length:\r\n", hidden), []int{400}, nil},
		"space before colon":         {post("Content-Length : 3\r\n", "abc"+hidden), []int{400}, nil},
		"chunked, space":             {post("Transfer-Encoding : chunked\r\n", "0\r\n\r\n"+hidden), []int{400}, nil},
		"chunked, tab":               {post("Transfer-Encoding:\tchunked\r\n", "0\r\n\r\n") + last, []int{200, 200}, []string{"POST /x ", "GET /last "}},
		"chunked, vertical tab":      {post("Transfer-Encoding: \vchunked\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"chunked, capitals":          {post("Transfer-Encoding: ChUnKeD\r\n", "0\r\n\r\n") + last, []int{200, 200}, []string{"POST /x ", "GET /last "}},
		"chunked, twice":             {post(chunked+chunked, "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"chunked, listed twice":      {post("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"chunked and identity":       {post("Transfer-Encoding: chunked, identity\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"chunked, then identity":     {post(chunked+"Transfer-Encoding: identity\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"xchunked":                   {post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"chunked in quotes":          {post("Transfer-Encoding: \"chunked\"\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"gzip, chunked":              {post("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"+hidden), []int{400, 501}, nil},
		"underscore":                 {post("Transfer_Encoding: chunked\r\nContent-Length: 3\r\n", "abc") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"folded value":               {post("X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "abc") + last, []int{400}, nil},
		"folded encoding":            {post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n") + last, []int{400}, nil},
		"folded first line":          {"GET /x HTTP/1.1\r\n Host: HOST\r\n\r\n" + hidden, []int{400}, nil},
		"bare line feeds":            {"POST /x HTTP/1.1\nHost: HOST\nContent-Length: 3\n\nabc" + last, []int{400}, nil},
		"bare return in a value":     {post("X-A: b\rTransfer-Encoding: chunked\r\nContent-Length: 3\r\n", "abc"), []int{400}, nil},
		"zero in a value":            {post("X-A: b\x00\r\nContent-Length: 3\r\n", "abc"), []int{400}, nil},
		"chunks and length":          {post(chunked+"Content-Length: 5\r\n", "0\r\n\r\n"+hidden), []int{400}, nil},
		"bare line feed at the end":  {"GET /x HTTP/1.1\r\nHost: HOST\r\n\n" + last, []int{400}, nil},
		"bare line feed in a line":   {"GET /x HTTP/1.1\r\nHost: HOST\r\nX-A: b\nX-B: c\r\n\r\n" + last, []int{400}, nil},
		"folded with a tab":          {"GET /x HTTP/1.1\r\nHost: HOST\r\nX-A: b\r\n\tc\r\n\r\n" + last, []int{400}, nil},
		"folded trailer":             {post(chunked, "0\r\nX-A: b\r\n c\r\n\r\n") + last, []int{400}, nil},
		"trailer, line feed":         {post(chunked, "0\r\nX-A: b\n\r\n") + last, []int{400}, nil},
		"HTTP/2 in the middle":       {post("", "") + "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []int{200, 400}, []string{"POST /x "}},
		"second one folded":          {post("", "") + "GET /y HTTP/1.1\r\nHost: HOST\r\nX-A: b\r\n c\r\n\r\n" + last, []int{200, 400}, []string{"POST /x "}},
		"second one, line feed":      {post("", "") + "\n" + last, []int{200, 400}, []string{"POST /x "}},
		"third one, both lengths":    {post("Content-Length: 3\r\n", "abc") + post(chunked, "1\r\na\r\n0\r\n\r\n") + post("Content-Length: 3\r\n"+chunked, "0\r\n\r\n") + last, []int{200, 200, 400}, []string{"POST /x abc", "POST /x a"}},
		"chunk extensions":           {post(chunked, "3;a=b;c\r\nabc\r\n0;x\r\n\r\n") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"chunk extension, line feed": {post(chunked, "3;a\nabc\r\n0\r\n\r\n"+hidden), []int{400}, nil},
		"chunk size, line feed":      {post(chunked, "3\nabc\r\n0\r\n\r\n"+hidden), []int{400}, nil},
		"chunk size, sign":           {post(chunked, "+3\r\nabc\r\n0\r\n\r\n"+hidden), []int{400}, nil},
		"chunk size, 0x":             {post(chunked, "0x3\r\nabc\r\n0\r\n\r\n"+hidden), []int{400}, nil},
		"chunk size, overflow":       {post(chunked, "10000000000000003\r\nabc\r\n0\r\n\r\n"+hidden), []int{400}, nil},
		"chunk too long":             {post(chunked, "3\r\nabcd\r\n0\r\n\r\n"+hidden), []int{400}, nil},
		"no end of the chunks":       {post(chunked, "3\r\nabc\r\n0\r\nX: y\r\n\r\n") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"encoding in the trailer":    {post(chunked, "0\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\nHost: evil\r\n\r\n") + last, []int{200, 200}, []string{"POST /x ", "GET /last "}},
		"chunks in HTTP/1.0":         {"POST /x HTTP/1.0\r\nHost: HOST\r\n" + chunked + "\r\n0\r\n\r\n", []int{400}, nil},
		"HTTP/1.9":                   {"GET /x HTTP/1.9\r\nHost: HOST\r\nConnection: close\r\n\r\n", []int{200, 400, 505}, nil},
		"HTTP/3.0":                   {"GET /x HTTP/3.0\r\nHost: HOST\r\n\r\n", []int{400, 505}, nil},
		"spaces in the line":         {"GET  /x HTTP/1.1\r\nHost: HOST\r\n\r\n", []int{400}, nil},
		"tab in the line":            {"GET\t/x HTTP/1.1\r\nHost: HOST\r\n\r\n", []int{400}, nil},
		"line feed before":           {"\r\nGET /x HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", []int{200, 400}, nil},
		"method with a line end":     {"GE%0d%0aT /x HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", []int{200, 400}, nil},
		"length in Connection":       {post("Connection: Content-Length\r\nContent-Length: 3\r\n", "abc") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"host in Connection":         {post("Connection: Host, Content-Type\r\nContent-Length: 3\r\n", "abc") + last, []int{200, 200}, []string{"POST /x abc", "GET /last "}},
		"body of a GET":              {"GET /x HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\n\r\nabc" + last, []int{200, 200}, []string{"GET /x abc", "GET /last "}},
		"pipelined":                  {"GET /1 HTTP/1.1\r\nHost: HOST\r\n\r\nGET /2 HTTP/1.1\r\nHost: HOST\r\n\r\n" + last, []int{200, 200, 200}, []string{"GET /1 ", "GET /2 ", "GET /last "}},
	} {
		smuggle := func(t *testing.T, s *recorder, got []string, warm int) {
			checkStatuses(t, got, c.want, c.seen)
			var seen []string
			for _, text := range s.requests(t)[warm:] {
				checkRequest(t, text)
				seen = append(seen, brief(t, text))
			}
			if refused := len(c.want) > 0 && c.want[0] >= 400; refused || c.seen != nil {
				// What was refused for its body may have been begun, and broken off.
				whole := slices.DeleteFunc(seen, func(s string) bool { return strings.HasSuffix(s, "(broken)") })
				if !slices.Equal(whole, c.seen) {
					t.Errorf("the sandbox saw %q, want %q", seen, c.seen)
				}
			}
		}
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			s := record(t, okAnswer)
			smuggle(t, s, w.send(t, strings.ReplaceAll(c.send, "HOST", w.box("a").host(s.port))), 0)
		})
		t.Run(name+", on the fast path", func(t *testing.T) {
			w := fastPathFixture(t)
			s := record(t, okAnswer)
			b := w.box("a")
			conn := w.fastConn(t, b, s.port)
			if _, err := io.WriteString(conn, strings.ReplaceAll(c.send, "HOST", b.host(s.port))); err != nil {
				t.Fatal(err)
			}
			smuggle(t, s, answers(t, conn), warmUps)
		})
	}
}

// checkStatuses compares all statuses if it is known what the sandbox sees; else any one is right.
func checkStatuses(t *testing.T, got []string, want []int, seen []string) {
	t.Helper()
	var statuses []int
	for _, text := range got {
		status, _ := strconv.Atoi(text[:3])
		statuses = append(statuses, status)
	}
	if seen != nil && !slices.Equal(statuses, want) || seen == nil && (len(statuses) != 1 || !slices.Contains(want, statuses[0])) {
		t.Errorf("got %q, want %v", got, want)
	}
}

// brief is the method, path and body of a request.
func brief(t *testing.T, text string) string {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
	if err != nil {
		t.Errorf("%q: %v", text, err)
		return text
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		body = append(body, "(broken)"...)
	}
	for name := range r.Trailer {
		if headers.IsHop(name) || headers.IsGateways(name) {
			t.Errorf("trailer %s went through", name)
		}
	}
	return r.Method + " " + r.RequestURI + " " + string(body)
}

// TestBadHosts: what is not a host, or two, reaches no sandbox.
func TestBadHosts(t *testing.T) {
	w := newFixture(t)
	s := record(t, okAnswer)
	b := w.box("a")
	host := strings.TrimPrefix(b.url(s.port, ""), "http://")
	for name, c := range map[string]struct {
		head string
		want int
	}{
		"none":              {"GET / HTTP/1.1\r\n", 400},
		"two":               {"GET / HTTP/1.1\r\nHost: " + host + "\r\nHost: " + host + "\r\n", 400},
		"user":              {"GET / HTTP/1.1\r\nHost: x@" + host + "\r\n", 400},
		"slash":             {"GET / HTTP/1.1\r\nHost: " + host + "/x\r\n", 400},
		"space":             {"GET / HTTP/1.1\r\nHost: " + host + " x\r\n", 400},
		"list":              {"GET / HTTP/1.1\r\nHost: " + host + "," + host + "\r\n", 400},
		"percent":           {"GET / HTTP/1.1\r\nHost: " + strings.Replace(host, "-", "%2d", 1) + "\r\n", 400},
		"not ASCII":         {"GET / HTTP/1.1\r\nHost: ä." + testDomain + "\r\n", 400},
		"too long":          {"GET / HTTP/1.1\r\nHost: " + strings.Repeat("a", 5000) + "." + testDomain + "\r\n", 400},
		"other in the line": {"GET http://" + host + "/x HTTP/1.1\r\nHost: other.example\r\n", 200}, // the line wins
		"user in the line":  {"GET http://u:p@" + host + "/x HTTP/1.1\r\nHost: " + host + "\r\n", 200},
		"no scheme":         {"GET " + host + "/x HTTP/1.1\r\nHost: " + host + "\r\n", 400},
		"connect":           {"CONNECT " + host + ":80 HTTP/1.1\r\nHost: " + host + "\r\n", 405},
		"asterisk":          {"OPTIONS * HTTP/1.1\r\nHost: " + host + "\r\n", 200},
		"asterisk, GET":     {"GET * HTTP/1.1\r\nHost: " + host + "\r\n", 400},
	} {
		t.Run(name, func(t *testing.T) {
			got := w.send(t, c.head+"Connection: close\r\n\r\n")
			if len(got) != 1 || got[0][:3] != strconv.Itoa(c.want) {
				t.Errorf("got %q, want %d", got, c.want)
			}
		})
	}
	for _, text := range s.requests(t) {
		checkRequest(t, text)
		if strings.Contains(text, "u:p@") || strings.Contains(text, "other.example") || strings.Contains(text, "http://") {
			t.Errorf("the sandbox saw %q", text)
		}
	}
}

func TestHugeHeaders(t *testing.T) {
	w := newFixture(t)
	s := record(t, okAnswer)
	host := strings.TrimPrefix(w.box("a").url(s.port, ""), "http://")
	head := "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n"
	if got := w.send(t, head+"X-A: "+strings.Repeat("a", 60<<10)+"\r\n\r\n"); len(got) != 1 || got[0] != "200 ok" {
		t.Errorf("60 KiB in one header: %.50q", got)
	}
	for name, more := range map[string]string{
		"one line": "X-A: " + strings.Repeat("a", 2<<20) + "\r\n",
		"many":     strings.Repeat("X-A: "+strings.Repeat("a", 100)+"\r\n", 20_000),
	} {
		c := w.connect(t)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = io.WriteString(c, head+more+"\r\n") }) // it may be refused before all is sent
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			_ = res.Body.Close()
			if res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
				t.Errorf("%s: got %d", name, res.StatusCode)
			}
		}
		_ = c.Close()
		wg.Wait()
	}
	if n := len(s.requests(t)); n != 1 {
		t.Errorf("the sandbox saw %d requests", n)
	}
}

// TestSlowBothWays has every byte of request and response come alone.
func TestSlowBothWays(t *testing.T) {
	w := newFixture(t)
	const answer = "HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nX-T: t\r\n\r\n"
	port := raw(t, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		if body, err := io.ReadAll(r.Body); err != nil || string(body) != "hello" {
			_, _ = io.WriteString(c, "HTTP/1.1 500 Odd\r\nContent-Length: 0\r\n\r\n")
			return
		}
		dribble(c, answer)
	})
	host := strings.TrimPrefix(w.box("a").url(port, ""), "http://")
	for name, text := range map[string]string{
		"sized":   "POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
		"chunked": "POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n4\r\nello\r\n0\r\n\r\n",
	} {
		c := w.connect(t)
		var wg sync.WaitGroup
		wg.Go(func() { dribble(c, text) })
		if got := answers(t, c); len(got) != 1 || got[0] != "200 abcdefgh" {
			t.Errorf("%s: got %q", name, got)
		}
		wg.Wait()
	}
}

// dribble writes byte by byte: Go sends each at once.
func dribble(c io.Writer, text string) {
	for i := range len(text) {
		if _, err := io.WriteString(c, text[i:i+1]); err != nil {
			return
		}
	}
}

// TestHalfClose: a service that ends its side after its answer loses nothing. A client that ends
// its side has gone, as far as HTTP can tell: the service's connection is closed, and nothing hangs.
func TestHalfClose(t *testing.T) {
	w := newFixture(t)
	gone := make(chan error, 1)
	port := raw(t, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		if r.URL.Path == "/wait" {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nfirst")
			_, err := c.Read(make([]byte, 1))
			gone <- err
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n"+strings.Repeat("x", 1<<20))
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	})
	host := strings.TrimPrefix(w.box("a").url(port, ""), "http://")
	if got := w.send(t, "GET / HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n"); len(got) != 1 || len(got[0]) != 4+1<<20 {
		t.Errorf("got %d answers, %.20q", len(got), got)
	}
	c := w.connect(t)
	if _, err := io.WriteString(c, "GET /wait HTTP/1.1\r\nHost: "+host+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	for line := ""; !strings.Contains(line, "first"); {
		b, err := in.ReadByte()
		if err != nil {
			t.Fatal(err)
		}
		line += string(b)
	}
	_ = c.CloseWrite()
	select {
	case err := <-gone:
		if err == nil {
			t.Error("the service was sent something")
		}
	case <-time.After(eventually.Patience):
		t.Error("the service still waits for a client that has gone")
	}
	w.idle()
}

// TestContinue: the body is held back until the service wants it, and never sent when it refuses.
func TestContinue(t *testing.T) {
	w := newFixture(t, func(c *Config) { c.continueWait = eventually.Patience })
	port := raw(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil || r.Header.Get("Expect") != "100-continue" {
			return
		}
		if r.URL.Path == "/refuse" {
			_, _ = io.WriteString(c, "HTTP/1.1 417 Expectation Failed\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
			_, _ = in.ReadByte()
			return
		}
		if in.Buffered() > 0 {
			return // the body came unasked
		}
		_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n")
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	})
	host := strings.TrimPrefix(w.box("a").url(port, ""), "http://")
	head := func(path string) string {
		return "POST " + path + " HTTP/1.1\r\nHost: " + host + "\r\nExpect: 100-continue\r\nContent-Length: 5\r\nConnection: close\r\n\r\n"
	}
	c := w.connect(t)
	if _, err := io.WriteString(c, head("/take")); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("HTTP/1.1 100 Continue\r\n\r\n"))
	if _, err := io.ReadFull(c, line); err != nil || string(line) != "HTTP/1.1 100 Continue\r\n\r\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	_, _ = io.WriteString(c, "hello")
	if got := answers(t, c); len(got) != 1 || got[0] != "200 hello" {
		t.Errorf("got %q", got)
	}
	if got := w.send(t, head("/refuse")); len(got) != 1 || got[0] != "417 no" {
		t.Errorf("refused: got %q", got)
	}
	w.idle()
}

// TestContinueAndHints: hints that come with a "100 Continue" reach the client whole.
func TestContinueAndHints(t *testing.T) {
	w := newFixture(t)
	const hint = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
	port := raw(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n"+strings.Repeat(hint, 5))
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
	})
	host := w.box("a").host(port)
	for range 20 {
		c := w.connect(t)
		if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: "+host+"\r\nExpect: 100-continue\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"); err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		text := string(all)
		if strings.Count(text, hint) != 5 || strings.Count(text, "HTTP/1.1 100 Continue\r\n\r\n") != 1 || strings.Count(text, "HTTP/1.1 ") != 7 || !strings.HasSuffix(text, "\r\n\r\nok") {
			t.Fatalf("got %q", text)
		}
	}
}

// TestEarlyAnswerEndsTheConnection: after an answer that came before the end of the request, what
// the client sends is the rest of a body, even if it looks like a request.
func TestEarlyAnswerEndsTheConnection(t *testing.T) {
	w := newFixture(t)
	port := raw(t, func(c net.Conn) {
		if _, err := http.ReadRequest(bufio.NewReaderSize(c, 16)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
			_, _ = io.Copy(io.Discard, c)
		}
	})
	host := strings.TrimPrefix(w.box("a").url(port, ""), "http://")
	for _, framing := range []string{"Content-Length: 100000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"} {
		c := w.connect(t)
		if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: "+host+"\r\n"+framing); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(c)
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(res.Body); err != nil || res.StatusCode != http.StatusRequestEntityTooLarge || !res.Close || string(text) != "no" {
			t.Errorf("got %d %q, %v, Connection: close is %v", res.StatusCode, text, err, res.Close)
		}
		_ = res.Body.Close()
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if more, _ := io.ReadAll(in); len(more) > 0 {
			t.Errorf("the rest of the body was answered: %q", more)
		}
	}
	w.idle()
}

// TestInterim passes interim answers on, each with its own headers alone.
func TestInterim(t *testing.T) {
	w := newFixture(t)
	s := record(t, "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\r\n"+okAnswer)
	host := strings.TrimPrefix(w.box("a").url(s.port, ""), "http://")
	c := w.connect(t)
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(all), "\r\n\r\n")
	if len(parts) != 4 || !strings.HasPrefix(parts[0], "HTTP/1.1 102 ") || !strings.HasPrefix(parts[1], "HTTP/1.1 103 Early Hints\r\nLink: </a>") ||
		strings.Contains(parts[1], "X-Hop") || !strings.HasPrefix(parts[2], "HTTP/1.1 200 OK") || strings.Contains(parts[2], "Link") || parts[3] != "ok" {
		t.Errorf("got %q", parts)
	}
}

// TestBodiless: answers without a body keep the length that they announce, and the connection.
func TestBodiless(t *testing.T) {
	for name, c := range map[string]struct{ method, answer, want string }{
		"HEAD":         {"HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", "Content-Length: 1000"},
		"HEAD chunked": {"HEAD", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "200 OK"},
		"HEAD unsized": {"HEAD", "HTTP/1.1 200 OK\r\nX-A: b\r\n\r\n", "X-A: b"},
		"204":          {"DELETE", "HTTP/1.1 204 No Content\r\n\r\n", "204 No Content"},
		"304":          {"GET", "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n", "304 Not Modified"},
		"empty":        {"GET", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "Content-Length: 0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			s := record(t, c.answer)
			host := strings.TrimPrefix(w.box("a").url(s.port, ""), "http://")
			request := c.method + " / HTTP/1.1\r\nHost: " + host + "\r\n"
			conn := w.connect(t)
			if _, err := io.WriteString(conn, request+"\r\n"+request+"Connection: close\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			all, err := io.ReadAll(conn)
			if err != nil {
				t.Fatal(err)
			}
			parts := strings.Split(string(all), "\r\n\r\n")
			if len(parts) != 3 || parts[2] != "" || !strings.Contains(parts[0], c.want) || !strings.Contains(parts[1], c.want) {
				t.Errorf("got %q", parts)
			}
		})
	}
}

// TestUpgrade carries a protocol of its own both ways, and the end of each side alone.
func TestUpgrade(t *testing.T) {
	w := newFixture(t)
	port := raw(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil || r.Header.Get("Upgrade") != "custom/1" {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: custom/1\r\n\r\nhello ")
		all, _ := io.ReadAll(in) // until the client has closed its side
		_, _ = c.Write(bytes.ToUpper(all))
	})
	host := strings.TrimPrefix(w.box("a").url(port, ""), "http://")
	c := w.connect(t)
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+host+"\r\nConnection: Upgrade\r\nUpgrade: custom/1\r\n\r\nearly "); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(c)
	res, err := http.ReadResponse(in, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols || res.Header.Get("Upgrade") != "custom/1" {
		t.Fatalf("got %v, %v", res, err)
	}
	_ = res.Body.Close()
	_, _ = io.WriteString(c, "late")
	_ = c.CloseWrite()
	if all, err := io.ReadAll(in); err != nil || string(all) != "hello EARLY LATE" {
		t.Errorf("got %q, %v", all, err)
	}
	w.idle()
}

// TestUpgradeUnderABody: what follows a request belongs to its body until that is whole, whatever the
// service responds, and has one reader.
func TestUpgradeUnderABody(t *testing.T) {
	w := newFixture(t)
	port := raw(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if r.URL.Path == "/whole" {
			_, _ = io.Copy(io.Discard, r.Body)
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: custom/1\r\n\r\n")
		_, _ = io.Copy(c, in)
	})
	host := w.box("a").host(port)
	for path, c := range map[string]struct {
		length int
		want   int
	}{"/early": {1 << 30, http.StatusBadGateway}, "/whole": {3, http.StatusSwitchingProtocols}} {
		conn := w.connect(t)
		if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: custom/1\r\nContent-Length: %d\r\n\r\nabc", path, host, c.length); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { dribble(conn, strings.Repeat("x", 1000)) })
		in := bufio.NewReader(conn)
		res, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != c.want {
			t.Errorf("%s: got %d, want %d", path, res.StatusCode, c.want)
		}
		_ = res.Body.Close()
		if res.StatusCode == http.StatusSwitchingProtocols {
			got := make([]byte, 1000)
			if _, err := io.ReadFull(in, got); err != nil || strings.Trim(string(got), "x") != "" {
				t.Errorf("%s: echo %.20q, %v", path, got, err)
			}
		}
		_ = conn.Close()
		wg.Wait()
	}
	w.idle()
}
