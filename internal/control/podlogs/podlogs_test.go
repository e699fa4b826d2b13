package podlogs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

var began = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }

// fixture is a sandbox that runs, whose agent and kubelet are handlers.
type fixture struct {
	Agents
	s       *agents.Sandbox
	kubelet http.HandlerFunc
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{s: &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", UID: "u"}}}
	f.s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main"}, {Name: "web"}}
	f.s.Status.PodIPs, f.s.Status.Barchan = []string{"127.0.0.1"}, &agents.BarchanStatus{StartedAt: new(metav1.NewTime(began))}
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f.kubelet(w, r) }))
	t.Cleanup(api.Close)
	pods, err := corev1client.NewForConfig(&rest.Config{Host: api.URL})
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	f.Agents = Agents{Client: agentclient.New(agentclient.Config{Tokens: tokens, Dial: agentOf(t)}), Pods: pods}
	return f
}

// agentOf dials an agent with one line, ten milliseconds after the start.
func agentOf(t *testing.T) func(ctx context.Context, network, address string) (net.Conn, error) {
	t.Helper()
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != envd.PathLogs {
			t.Errorf("the agent got %s", r.URL)
		}
		_ = json.NewEncoder(w).Encode(envd.LogLine{Timestamp: at(10), Source: envd.SourceAgent, Line: "started"})
		if r.URL.Query().Get("follow") != "" {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}))
	t.Cleanup(agent.Close)
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", agent.Listener.Addr().String())
	}
}

func texts(lines []envd.LogLine) (all []string) {
	for _, l := range lines {
		all = append(all, fmt.Sprintf("%d %s %s", l.Timestamp.Sub(began).Milliseconds(), l.Source, l.Line))
	}
	return all
}

func TestLogs(t *testing.T) {
	f := newFixture(t)
	f.kubelet = func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if r.URL.Path != "/api/v1/namespaces/a/pods/s/log" || q.Get("timestamps") != "true" || q.Get("tailLines") == "" || q.Get("follow") != "" {
			t.Errorf("asked for %s", r.URL)
		}
		for _, ms := range []int{1, 20, 30} {
			fmt.Fprintf(w, "%s %s %d\n", at(ms).Format(time.RFC3339Nano), q.Get("container"), ms)
		}
	}
	for name, tt := range map[string]struct {
		container string
		since     time.Time
		want      []string
	}{
		"all":               {"", time.Time{}, []string{"1 entrypoint main 1", "10 agent started", "20 entrypoint main 20", "30 entrypoint main 30"}},
		"since":             {"", at(20), []string{"20 entrypoint main 20", "30 entrypoint main 30"}},
		"another container": {"web", time.Time{}, []string{"1 entrypoint web 1", "20 entrypoint web 20", "30 entrypoint web 30"}},
	} {
		if got, err := f.Logs(t.Context(), f.s, tt.container, tt.since); err != nil || !slices.Equal(texts(got), tt.want) {
			t.Errorf("%s: %q, %v, want %q", name, texts(got), err, tt.want)
		}
	}
	f.s.Status.PodIPs = nil
	if _, err := f.Logs(t.Context(), f.s, "", time.Time{}); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("without a Pod of its own: %v", err)
	}
}

// TestLogsAreBounded: the end of a long log is kept, and a long line divided.
func TestLogsAreBounded(t *testing.T) {
	f := newFixture(t)
	f.kubelet = func(w http.ResponseWriter, _ *http.Request) {
		for i := range 40 {
			fmt.Fprintf(w, "%s %d%s\n", at(i).Format(time.RFC3339Nano), i, strings.Repeat("x", maxLine))
		}
	}
	got, err := f.Logs(t.Context(), f.s, "web", time.Time{})
	size := 0
	for _, l := range got {
		size += len(l.Line)
	}
	if err != nil || size > maxBytes || size < maxBytes-2*maxLine || len(got[0].Line) > maxLine || !got[len(got)-1].Timestamp.Equal(at(39)) {
		t.Errorf("%d lines, %d bytes, %v", len(got), size, err)
	}
}

func TestLogsWithoutRight(t *testing.T) {
	f := newFixture(t)
	f.kubelet = func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(metav1.Status{Status: metav1.StatusFailure, Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: "no"})
	}
	const hint = "kubectl logs -n a s -c "
	got, err := f.Logs(t.Context(), f.s, "", time.Time{})
	if err != nil || len(got) != 2 || !strings.Contains(got[0].Line, hint+"main") || got[0].Level != "WARN" || got[1].Line != "started" {
		t.Errorf("%q, %v", texts(got), err)
	}
	if got, err := f.Logs(t.Context(), f.s, "", at(1)); err != nil || !slices.Equal(texts(got), []string{"10 agent started"}) {
		t.Errorf("a client that has the warning gets %q, %v", texts(got), err)
	}
	if _, err := f.Logs(t.Context(), f.s, "web", time.Time{}); !errors.Is(err, errs.ErrForbidden) || !strings.Contains(errs.Text(err), hint+"web") {
		t.Errorf("of a container without an agent: %v", err)
	}
}

func TestFollow(t *testing.T) {
	f := newFixture(t)
	f.kubelet = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("follow") != "true" {
			t.Errorf("asked for %s", r.URL)
		}
		_, _ = io.WriteString(w, at(1).Format(time.RFC3339Nano)+" out\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
	for source, want := range map[string][]string{
		"": {"1 entrypoint out", "10 agent started"}, envd.SourceEntrypoint: {"1 entrypoint out"}, envd.SourceAgent: {"10 agent started"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		var got []envd.LogLine
		err := f.Follow(ctx, f.s, "", source, func(l envd.LogLine) error {
			if got = append(got, l); len(got) == len(want) {
				cancel()
			}
			return nil
		})
		all := texts(got)
		if slices.Sort(all); !slices.Equal(all, want) || !errors.Is(err, context.Canceled) {
			t.Errorf("%q: %q, %v, want %q", source, all, err, want)
		}
		cancel()
	}
}
