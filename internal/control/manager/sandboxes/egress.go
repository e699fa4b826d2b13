package sandboxes

import (
	"context"
	"errors"
	"fmt"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// EgressQuery is a destination of a sandbox's traffic.
type EgressQuery struct {
	// Destination is an address or a domain name.
	Destination string
	// Port is from 1 to 65535.
	Port int32
	// Protocol is tcp, udp or another name.
	Protocol string
}

// EgressDecision is whether a sandbox may reach a destination.
type EgressDecision struct {
	// Verdict is allowed, refused, or resolver: Barchan's own receives it.
	Verdict string
	// Rule is the rule that decides, for users, and Source whose it is: sandbox, template or host.
	Rule, Source string
}

// Egress returns whether the tenant's sandbox may reach a destination, and by which rule. Nothing is sent there. An
// errors.ErrUnsupported says that there is no node: on a cluster.
func (st *Store) Egress(ctx context.Context, namespace, id string, q EgressQuery) (EgressDecision, error) {
	if q.Port < 1 || q.Port > 65535 {
		return EgressDecision{}, apistatus.Refuse(errs.ErrInvalid, "port: must be from 1 to 65535")
	}
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return EgressDecision{}, err
	}
	if st.TraceEgress == nil {
		return EgressDecision{}, errs.Public(errors.ErrUnsupported, "network trace: not available on a Kubernetes cluster, whose network enforces NetworkPolicies")
	}
	d, err := st.TraceEgress(ctx, sandbox.IDOf(s.UID), q)
	switch {
	case errors.Is(err, errs.ErrInvalid):
		return EgressDecision{}, apistatus.Refuse(errs.ErrInvalid, "%s", errs.Text(err))
	case errors.Is(err, errs.ErrNotFound): // 404 would mean that the sandbox is gone
		return EgressDecision{}, apistatus.Refuse(errs.ErrConflict, "%s", errs.Text(err))
	case err != nil:
		return EgressDecision{}, fmt.Errorf("trace egress of sandbox %s: %w", id, err)
	}
	return d, nil
}
