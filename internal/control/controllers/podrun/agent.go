package podrun

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// prepare sends token and environment to the agent of a container that has started, and returns the state after that.
func (r *Runner) prepare(ctx context.Context, s *agents.Sandbox, pods []*corev1.Pod) (sandbox.Observed, error) {
	s = s.DeepCopy()
	s.Status.PodIPs = []string{pods[0].Status.PodIP}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	now := runOf(pods[0])
	for pause := 10 * time.Millisecond; !r.initialized(s, now); pause *= 2 { // the status may not show yet that it is
		err := r.prepareOnce(ctx, s, now)
		if err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return r.observed(s, pods), errs.Public(fmt.Errorf("%w: %w", err, errs.ErrUnavailable), "its agent does not answer: "+err.Error())
		case <-time.After(pause):
		}
	}
	if s.Status.Barchan == nil {
		s.Status.Barchan = &agents.BarchanStatus{}
	}
	s.Status.Barchan.StartedAt = new(metav1.NewTime(startOf(pods[0])))
	return r.observed(s, pods), nil
}

func (r *Runner) prepareOnce(ctx context.Context, s *agents.Sandbox, now run) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return r.send(ctx, s, now)
}

// initRequest returns what the agent of a sandbox must know: its token, and the plain values of its first
// container's environment, which a claim may have added to. Kubelet has expanded the others when the container started.
func (r *Runner) initRequest(s *agents.Sandbox) envd.InitRequest {
	req := envd.InitRequest{Open: !s.Spec.AgentSecured(), AccessToken: r.cfg.Tokens.Agent(sandbox.IDOf(s.UID))}
	if containers := s.Spec.PodTemplate.Spec.Containers; len(containers) > 0 {
		for _, v := range containers[0].Env {
			refers := strings.Contains(strings.ReplaceAll(v.Value, "$$", ""), "$(") // "$$" stands for "$"
			if v.ValueFrom != nil || refers {
				continue
			}
			if req.EnvVars == nil {
				req.EnvVars = map[string]string{}
			}
			req.EnvVars[v.Name] = strings.ReplaceAll(v.Value, "$$", "$")
		}
	}
	return req
}

// send sends its request to the agent of a container's run.
func (r *Runner) send(ctx context.Context, s *agents.Sandbox, now run) error {
	req := r.initRequest(s)
	if err := r.cfg.Agents.Bind(ctx, s, req); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bound[client.ObjectKeyFromObject(s)] = binding{now, fingerprint(req)}
	return nil
}

// fingerprint is equal for equal requests.
func fingerprint(req envd.InitRequest) string {
	text, err := json.Marshal(req)
	if err != nil {
		return "" // not of strings and booleans
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// initialized reports whether the agent of a container's run has accepted the current request of this process.
func (r *Runner) initialized(s *agents.Sandbox, now run) bool {
	want := binding{now, fingerprint(r.initRequest(s))}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.bound[client.ObjectKeyFromObject(s)] == want
}

func (r *Runner) forget(s types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.bound, s)
}

// refused returns the error of a field of spec.barchan that a Pod cannot honour.
func refused(name, why string) error {
	return fmt.Errorf("%w: %w", field.Forbidden(field.NewPath("spec", "barchan", name), why), errs.ErrInvalid)
}
