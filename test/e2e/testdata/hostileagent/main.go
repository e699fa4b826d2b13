// Command hostileagent is an agent that lets its sandbox start, and then answers each request with the attack that a
// request to port 8080, "/?<attack>", has set.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync/atomic"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/hostileagent" //nolint:depguard // a program of a test
)

func main() {
	if len(os.Args) > 1 { // the server asks for the version
		fmt.Println(envd.Version)
		return
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	var attack atomic.Value
	attack.Store("")
	ln, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", ":"+strconv.Itoa(envd.Port))
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go serve(conn, func() hostileagent.Attack { return hostileagent.Attacks()[attack.Load().(string)] })
		}
	}()
	return http.ListenAndServe(":8080", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { //nolint:gosec // a test's
		name, _ := url.QueryUnescape(r.URL.RawQuery)
		attack.Store(name)
	}))
}

func serve(conn net.Conn, attack func() hostileagent.Attack) {
	defer func() { _ = conn.Close() }()
	for requests := bufio.NewReader(conn); ; {
		req, err := http.ReadRequest(requests)
		if err != nil {
			return
		}
		if answer := attack(); answer != nil {
			hostileagent.Answer(conn, req, answer)
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		if _, err := io.WriteString(conn, "HTTP/1.1 204 No Content\r\n\r\n"); err != nil {
			return
		}
	}
}
