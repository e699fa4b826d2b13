package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// testParallel runs a command for more inputs than the namespace's quota has room for.
func testParallel(t *testing.T, s *server) {
	key := s.newKey("parallel", "--namespace", "team-parallel")
	s.mustKubectl("", "annotate", "--overwrite", "namespace", "team-parallel", "barchan.dev/quota-sandboxes=2")
	out, err := s.tryIn("1\n2\n3\n4\n5\n\n6\n", "run", "--json", "--parallel", "5", "--template", "base", "--api-key", key,
		"--", "sh", "-c", "echo out {}; echo err {} >&2; exit $(({} == 4 ? 7 : 0))")
	ended := (*exec.ExitError)(nil)
	if !errors.As(err, &ended) || ended.ExitCode() != 1 {
		t.Errorf("with a command that fails: %v", err)
	}
	codes := map[string]int{}
	for line := range strings.Lines(out) {
		var got struct {
			Input, Error, Stdout, Stderr string
			ExitCode                     *int
		}
		if json.Unmarshal([]byte(line), &got) != nil {
			continue // the summary
		}
		if got.ExitCode == nil || got.Stdout != "out "+got.Input+"\n" || got.Stderr != "err "+got.Input+"\n" {
			t.Errorf("an input has the result %s", line)
			continue
		}
		codes[got.Input] = *got.ExitCode
	}
	if len(codes) != 6 || codes["4"] != 7 || codes["1"]+codes["6"] != 0 {
		t.Errorf("exit codes %v", codes)
	}
	if !strings.Contains(out, "5 succeeded, 1 failed, 0 did not run to their end") {
		t.Errorf("the summary is missing:\n%s", out)
	}

	testQueue(t, s, key)
}

// testQueue has creates wait for the quota of a namespace, which is 2.
func testQueue(t *testing.T, s *server, key string) {
	api, err := client.New(client.Config{URL: "http://" + s.http, Key: key, HTTP: http.DefaultClient})
	if err != nil {
		t.Fatal(err)
	}
	create := func(queue time.Duration) (string, error) {
		made, err := api.Create(context.Background(), client.CreateOptions{TemplateID: "base", Timeout: 10 * time.Minute, QueueTimeout: queue})
		if err != nil {
			return "", err
		}
		return made.SandboxID, nil
	}
	refused := func(queue time.Duration, kind error, text string) error {
		if id, err := create(queue); !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
			return fmt.Errorf("a create that may wait %s: %q, %w", queue, id, err)
		}
		return nil
	}
	held := []string{s.create(key, "base"), s.create(key, "base")}
	if err := errors.Join(
		refused(86401*time.Second, errs.ErrInvalid, "Barchan-Queue-Timeout: want from 0 to 86400 seconds"),
		refused(time.Second, errs.ErrExhausted, "at most 2 sandboxes; 2 are running; waited 1s in the queue, and was number 1 of 1"),
	); err != nil {
		t.Error(err)
	}
	waited := make(chan error, 1)
	var id string
	go func() {
		var err error
		id, err = create(time.Minute)
		waited <- err
	}()
	eventually.NoError(t, "a create waits", func() error { return refused(time.Second, errs.ErrExhausted, "and was number 2 of 2") })
	s.call(key, http.MethodDelete, "/sandboxes/"+held[0], nil)
	if err := <-waited; err != nil {
		t.Fatalf("a create that waited for room: %v", err)
	}
	for _, id := range []string{held[1], id} {
		s.call(key, http.MethodDelete, "/sandboxes/"+id, nil)
	}
}
