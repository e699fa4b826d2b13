// Package podlogs reads the logs of sandboxes that are Pods: what their programs have written, which kubelets keep, and the lines of
// their agents, which are beside the programs and do not see that. It stores nothing, and knows no line of a container's earlier run.
package podlogs

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// maxLines and maxBytes bound what is read of a program's output: the end of it.
	maxLines = 10_000
	maxBytes = 1 << 20
	// maxLine is the length in bytes at which a line is divided.
	maxLine = 64 << 10
)

// Agents reaches the agents of Pods, and the output of their programs. It is safe for concurrent use.
type Agents struct {
	*agentclient.Client
	// Pods reads the logs by the API server.
	Pods corev1client.PodsGetter
}

// Logs returns the log lines of a container, the first one if empty, that are not older than since, oldest first; of programs the last
// MiB. A warning takes the place of the program's lines if the API server does not allow to read them; besides the first container, which
// alone has an agent, that is an errs.ErrForbidden.
func (a Agents) Logs(ctx context.Context, s *agents.Sandbox, container string, since time.Time) (lines []envd.LogLine, err error) {
	size := 0
	err = a.output(ctx, s, container, since, false, func(l envd.LogLine) error {
		lines, size = append(lines, l), size+len(l.Line)
		for size > maxBytes {
			size -= len(lines[0].Line)
			lines = lines[1:]
		}
		return nil
	})
	if err != nil || container != "" {
		return lines, err
	}
	own, err := a.Client.Logs(ctx, s, "", since)
	lines = append(lines, own...)
	slices.SortStableFunc(lines, func(x, y envd.LogLine) int { return x.Timestamp.Compare(y.Timestamp) })
	return lines, err
}

// Follow calls each for the lines of a container and a source, as envd.Client.Logs does, and then for what follows, until ctx ends or
// each returns an error. The calls are serial; lines of two sources are in no order.
func (a Agents) Follow(ctx context.Context, s *agents.Sandbox, container, source string, each func(envd.LogLine) error) error {
	var mu sync.Mutex
	serial := func(l envd.LogLine) error {
		mu.Lock()
		defer mu.Unlock()
		return each(l)
	}
	all, ctx := errgroup.WithContext(ctx)
	if source != envd.SourceAgent {
		all.Go(func() error { return a.output(ctx, s, container, time.Time{}, true, serial) })
	}
	if source != envd.SourceEntrypoint && container == "" {
		all.Go(func() error {
			agent, err := a.Agent(s)
			if err != nil {
				return err
			}
			return agent.Logs(ctx, envd.SourceAgent, true, serial)
		})
	}
	return all.Wait()
}

// output calls each for the lines that a program has written.
func (a Agents) output(ctx context.Context, s *agents.Sandbox, container string, since time.Time, follow bool, each func(envd.LogLine) error) error {
	if !sandbox.Started(s) { // a Pod of that name may be another's
		return fmt.Errorf("sandbox %s has no Pod that runs: %w", sandbox.IDOf(s.UID), errs.ErrUnavailable)
	}
	options := corev1.PodLogOptions{Container: container, Timestamps: true, TailLines: new(int64(maxLines)), Follow: follow}
	if container == "" {
		options.Container = s.Spec.PodTemplate.Spec.Containers[0].Name
	}
	if !since.IsZero() {
		options.SinceTime = new(metav1.NewTime(since))
	}
	log, err := a.Pods.Pods(s.Namespace).GetLogs(s.Name, &options).Stream(ctx)
	if err = unread(s, options.Container, err); errors.Is(err, errs.ErrForbidden) && container == "" {
		l := envd.LogLine{Timestamp: startOf(s), Source: envd.SourceAgent, Stream: envd.StreamStderr, Level: "WARN", Line: errs.Text(err)}
		if l.Timestamp.Before(since) {
			return nil
		}
		return each(l)
	} else if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	return lines(log, since, each)
}

func startOf(s *agents.Sandbox) time.Time {
	if s.Status.Barchan == nil || s.Status.Barchan.StartedAt == nil {
		return s.CreationTimestamp.Time
	}
	return s.Status.Barchan.StartedAt.Time
}

// unread gives an error of the API server a kind and a public message.
func unread(s *agents.Sandbox, container string, err error) error {
	kind := apistatus.Kind(err)
	if errors.Is(kind, errs.ErrForbidden) {
		return apistatus.Refuse(kind, "output of the program: this installation may not read logs of Pods in namespace %s; read them by `kubectl logs -n %s %s -c %s`, or bind the ClusterRole barchan-logs (docs/kubernetes.md)",
			s.Namespace, s.Namespace, s.Name, container)
	}
	if errors.Is(kind, errs.ErrNotFound) { // the sandbox is not gone
		return fmt.Errorf("read the log of Pod %s/%s: %w: %w", s.Namespace, s.Name, errs.ErrUnavailable, err)
	}
	if err != nil {
		return apistatus.From("read the log of Pod "+s.Namespace+"/"+s.Name, err)
	}
	return nil
}

// lines calls each for every line of a kubelet's log that is not older than since.
func lines(log io.Reader, since time.Time, each func(envd.LogLine) error) error {
	l := envd.LogLine{Source: envd.SourceEntrypoint, Stream: envd.StreamStdout} // the API server does not tell the streams apart
	in := bufio.NewReaderSize(log, maxLine)
	for begins := true; ; {
		text, more, err := in.ReadLine()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the log of a Pod: %w: %w", errs.ErrUnavailable, err)
		}
		l.Line = string(text)
		if at, rest, _ := strings.Cut(l.Line, " "); begins {
			if t, err := time.Parse(time.RFC3339Nano, at); err == nil {
				l.Timestamp, l.Line = t, rest
			}
		}
		begins = !more
		if l.Timestamp.Before(since) {
			continue
		}
		if err := each(l); err != nil {
			return err
		}
	}
}
