package agentconn

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// defaultWarmUp bounds a warm-up without its own timeout.
const defaultWarmUp = 5 * time.Minute

// WarmUp runs the warm-up of a template in a sandbox that runs. What only its author can correct is an errs.ErrInvalid.
func (a *Agents) WarmUp(ctx context.Context, c Container, w *agents.WarmUp) error {
	agent, err := a.Client(c)
	if err != nil {
		return err
	}
	limit := time.Duration(w.TimeoutSeconds) * time.Second
	if limit <= 0 {
		limit = defaultWarmUp
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	code, tail, err := agent.Run(limited, w.Command, envd.RunOptions{})
	switch {
	case err != nil && ctx.Err() == nil && limited.Err() != nil:
		return fmt.Errorf("spec.barchan.warmUp: did not end within %s: %q: %w", limit, tail, errs.ErrInvalid)
	case err != nil && envd.IsCode(err, connect.CodeInvalidArgument):
		return fmt.Errorf("spec.barchan.warmUp.command: %w: %w", err, errs.ErrInvalid)
	case err != nil:
		return errs.Retryable(fmt.Errorf("warm up: %w", err))
	case code != 0:
		return fmt.Errorf("spec.barchan.warmUp: %q ended with code %d: %q: %w", w.Command[0], code, tail, errs.ErrInvalid)
	}
	return nil
}
