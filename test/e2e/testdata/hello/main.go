// Command hello is all that the images of the tests hold: it prints what it is run with, or
// serves that over HTTP and WebSocket.
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/coder/websocket"
)

func main() {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "serve" {
		serve(args[1:])
		return
	}
	if len(args) > 1 && args[0] == "dial" {
		dial(args[1:])
		return
	}
	printRun(os.Stdout)
}

func printRun(w io.Writer) {
	dir, _ := os.Getwd()
	fmt.Fprintf(w, "args=%s dir=%s uid=%d gid=%d GREETING=%s\n", strings.Join(os.Args[1:], ","), dir, os.Getuid(), os.Getgid(), os.Getenv("GREETING"))
}

func serve(args []string) {
	addr := ":8080"
	if len(args) > 0 {
		addr = args[0]
	}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "proto=%s host=%s ", r.Proto, r.Host)
		printRun(w)
	})
	http.HandleFunc("/drip", func(w http.ResponseWriter, r *http.Request) {
		for i := 0; r.Context().Err() == nil; i++ {
			fmt.Fprintf(w, "drop %d\n", i)
			_ = http.NewResponseController(w).Flush()
			time.Sleep(50 * time.Millisecond)
		}
	})
	http.HandleFunc("/echo", echo)
	fmt.Println("hello serves on", addr)
	fmt.Fprintln(os.Stderr, http.ListenAndServe(addr, nil))
	os.Exit(1)
}

// echo sends back what it gets, by WebSocket.
func echo(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return
	}
	defer c.CloseNow()
	for {
		kind, data, err := c.Read(context.Background())
		if err != nil {
			return
		}
		if c.Write(context.Background(), kind, append([]byte("echo "), data...)) != nil {
			return
		}
	}
}

// dial tries addresses one after the other, and prints for each whether it responds.
func dial(addrs []string) {
	for _, a := range addrs {
		conn, err := net.DialTimeout("tcp", a, 700*time.Millisecond)
		if err != nil {
			fmt.Println(a, "no")
			continue
		}
		_ = conn.Close()
		fmt.Println(a, "yes")
	}
}
