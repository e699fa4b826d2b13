package harness

import (
	"context"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	// RowPool is the size of the pool that ClaimInARow claims from, row is how much of it.
	RowPool = 16
	row     = 12
	// poolSettle is what a pool that has just got its last member has to write that down.
	poolSettle = time.Second
)

// Pool makes the pool of a template, or changes its size.
func (s *Server) Pool(ctx context.Context, template string, size int) error {
	return s.Apply(ctx, PoolManifest(template, template, size))
}

// PoolManifest is the manifest of a pool of a template.
func PoolManifest(name, template string, size int) string {
	return fmt.Sprintf(`{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxWarmPool",
"metadata":{"name":%q,"namespace":"default"},"spec":{"replicas":%d,"sandboxTemplateRef":{"name":%q}}}`, name, size, template)
}

// AwaitMembers returns when so many members of all pools can be handed out.
func (s *Server) AwaitMembers(ctx context.Context, n int) error {
	ready := 0
	err := Poll(ctx, Tick, fmt.Sprintf("wait for %d members of the pool", n), func(ctx context.Context) (_ bool, err error) {
		ready, err = s.MembersReady(ctx)
		return ready >= n, err
	})
	if err != nil {
		return fmt.Errorf("%w (%d are ready)", err, ready)
	}
	return nil
}

// AwaitFull returns when so many members of all pools can be handed out, and are at rest.
func (s *Server) AwaitFull(ctx context.Context, n int) error {
	if err := s.AwaitMembers(ctx, n); err != nil {
		return err
	}
	return Rest(ctx, poolSettle)
}

// MembersReady returns how many members of all pools can be handed out.
func (s *Server) MembersReady(ctx context.Context) (int, error) {
	v, err := s.Metric(ctx, "barchan_picker_ready")
	return int(v), err
}

// ClaimInARow waits until a pool of RowPool members is full and at rest, claims most of it, and runs a command in each. It returns
// what each claim took, and how long it was until the command's output.
func (s *Server) ClaimInARow(ctx context.Context, o client.CreateOptions, argv ...string) (claims, outputs report.Samples, err error) {
	o.Timeout = time.Hour
	if err := s.AwaitFull(ctx, RowPool); err != nil {
		return nil, nil, err
	}
	var claimed []Sandbox
	for range row {
		x, claim, output, err := s.ClaimAndRun(ctx, o, argv...)
		if err != nil {
			return nil, nil, err
		}
		claims, outputs = append(claims, claim), append(outputs, output)
		claimed = append(claimed, x)
	}
	for _, x := range claimed {
		if err := s.Clear(ctx, x); err != nil {
			return nil, nil, err
		}
	}
	return claims, outputs, nil
}

// ClaimAndRun claims a sandbox and runs a command in it. It returns what the claim took, and how long it was until the command's
// output, in milliseconds.
func (s *Server) ClaimAndRun(ctx context.Context, o client.CreateOptions, argv ...string) (x Sandbox, claim, output float64, err error) {
	began := time.Now()
	if x, err = s.Claim(ctx, o); err != nil {
		return x, 0, 0, err
	}
	claim = report.Millis(time.Since(began))
	out, err := x.Run(ctx, argv...)
	if err == nil && out.Text == "" {
		err = fmt.Errorf("%v in a sandbox of %s printed nothing", argv, o.TemplateID)
	}
	return x, claim, report.Millis(out.First.Sub(began)), err
}
