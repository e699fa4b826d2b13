// Program pod runs in the Pods of tests, and as PID 1 of a cluster's namespaces.
//
//	pod             wait for SIGTERM, as the pause container of a Pod does
//	pod serve ADDR  answer HTTP requests with the name of the host
//	pod echo ARG... print the arguments
//	pod cat         copy the input to the output
//	pod api PATH    print a response of the API server, asked as the Pod's ServiceAccount
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return pause()
	}
	switch args[0] {
	case "serve":
		return serve(args[1])
	case "echo":
		_, err := fmt.Println(strings.Join(args[1:], " "))
		return err
	case "cat":
		_, err := io.Copy(os.Stdout, os.Stdin)
		return err
	case "api":
		return readAPI(args[1])
	}
	return fmt.Errorf("unknown command %q", args[0])
}

// pause waits for SIGTERM, and for the children that PID 1 inherits.
func pause() error {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return nil
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 && !errors.Is(err, syscall.EINTR) {
				break
			}
		}
	}
	return nil
}

func serve(address string) error {
	go func() {
		_ = pause()
		os.Exit(0)
	}()
	server := &http.Server{
		Addr: address, ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			name, err := os.Hostname()
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			fmt.Fprintln(w, name)
		}),
	}
	return server.ListenAndServe()
}

// readAPI finds the API server by the variables and files that each Pod has.
func readAPI(path string) error {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount"
	ca, err := os.ReadFile(filepath.Join(account, "ca.crt"))
	if err != nil {
		return err
	}
	token, err := os.ReadFile(filepath.Join(account, "token"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	host := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	req, err := http.NewRequest(http.MethodGet, "https://"+host+path, http.NoBody)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+string(token))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}, Timeout: time.Minute}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	_, err = io.Copy(os.Stdout, resp.Body)
	return err
}
