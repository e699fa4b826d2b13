// Command hostileagent is an agent that lets its sandbox start, and then answers each request with the attack that a
// request to port 8080, "/<path>?<attack>", has set for it.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/hostileagent"
)

var (
	mu     sync.Mutex
	attack string
)

func main() {
	if len(os.Args) > 1 { // the server asks for the version
		fmt.Println(envd.Version)
		return
	}
	go func() {
		_ = http.ListenAndServe(":8080", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			attack, _ = url.QueryUnescape(r.URL.RawQuery)
		}))
	}()
	ln, err := net.Listen("tcp", fmt.Sprintf(":%d", envd.Port))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		go serve(conn)
	}
}

func serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	requests := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(requests)
		if err != nil {
			return
		}
		mu.Lock()
		answer := hostileagent.Attacks()[attack]
		mu.Unlock()
		if answer != nil {
			go func() { _, _ = io.Copy(io.Discard, req.Body) }()
			answer(hostileagent.Count(conn), req)
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		if strings.HasPrefix(req.URL.Path, envd.PathEnvs) {
			_, err = io.WriteString(conn, "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}")
		} else {
			_, err = io.WriteString(conn, "HTTP/1.1 204 No Content\r\n\r\n")
		}
		if err != nil {
			return
		}
	}
}
