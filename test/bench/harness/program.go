package harness

import (
	"context"
	"fmt"
	"io"
	"net/http"
)

// programPort is the port of the programs that Serve starts.
const programPort = 8080

// Serve has a program of Python, which serves HTTP at port 8080, run in the background until it answers.
func (s *Server) Serve(ctx context.Context, x Sandbox, program string) error {
	if _, err := x.Run(ctx, "/bin/sh", "-c", `setsid python3 -c "$1" >/dev/null 2>&1 &`, "sh", program); err != nil {
		return err
	}
	return Poll(ctx, Tick, "wait for the program in "+x.ID, func(ctx context.Context) (bool, error) {
		_, err := s.Visit(ctx, x.ID)
		return err == nil, nil
	})
}

// Visit requests the program of a sandbox through the gateway.
func (s *Server) Visit(ctx context.Context, id string) (string, error) {
	base, h := s.REST.SandboxAddress(id, programPort)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/", nil)
	if err != nil {
		return "", fmt.Errorf("make request: %w", err)
	}
	req.Header = h
	res, err := s.REST.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET of sandbox %s: %d %s", id, res.StatusCode, body)
	}
	return string(body), err
}
