package adminapi

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// Addresses is the lease table; all methods may return errs.ErrUnavailable during the boot.
type Addresses interface {
	Leases(ctx context.Context) ([]adminclient.Lease, error)
	Subnets(ctx context.Context) ([]adminclient.Subnet, error)
	// FreeAddress ends a quarantine; any other address is an errs.ErrConflict that names its owner.
	FreeAddress(ctx context.Context, addr netip.Addr) error
	// CheckAddresses compares the lease table with live addresses and repairs it.
	CheckAddresses(ctx context.Context) ([]adminclient.Repair, error)
}

// Egress explains egress decisions.
type Egress interface {
	// TraceEgress returns the rule that decides. An unknown sandbox is an errs.ErrNotFound.
	TraceEgress(ctx context.Context, req adminclient.TraceRequest) (adminclient.Trace, error)
}

// handleNet adds the routes of addresses and of egress, as far as there is something behind them.
func (a *API) handleNet(mux *http.ServeMux) {
	if a.cfg.Addresses != nil {
		mux.HandleFunc("GET "+adminclient.PathLeases, func(w http.ResponseWriter, r *http.Request) {
			leases, err := a.cfg.Addresses.Leases(r.Context())
			a.answer(w, r, orEmpty(leases), err)
		})
		mux.HandleFunc("GET "+adminclient.PathSubnets, func(w http.ResponseWriter, r *http.Request) {
			subnets, err := a.cfg.Addresses.Subnets(r.Context())
			a.answer(w, r, orEmpty(subnets), err)
		})
		mux.HandleFunc("POST "+adminclient.PathCheck, func(w http.ResponseWriter, r *http.Request) {
			repairs, err := a.cfg.Addresses.CheckAddresses(r.Context())
			a.answer(w, r, orEmpty(repairs), err)
		})
		mux.HandleFunc("DELETE "+adminclient.PathFree+"/{address}", a.freeAddress)
	}
	if a.cfg.Egress != nil {
		mux.HandleFunc("POST "+adminclient.PathTrace, a.traceEgress)
	}
}

func (a *API) freeAddress(w http.ResponseWriter, r *http.Request) {
	addr, err := netip.ParseAddr(r.PathValue("address"))
	if err != nil {
		err = fmt.Errorf("address: %w: %w", err, errs.ErrInvalid)
	} else {
		err = a.cfg.Addresses.FreeAddress(r.Context(), addr)
	}
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *API) traceEgress(w http.ResponseWriter, r *http.Request) {
	var req adminclient.TraceRequest
	err := decode(w, r, &req)
	for _, f := range []struct{ name, value string }{
		{"sandboxID", req.Sandbox}, {"destination", req.Destination}, {"protocol", req.Protocol},
	} {
		if err == nil && f.value == "" {
			err = fmt.Errorf("%s: is empty: %w", f.name, errs.ErrInvalid)
		}
	}
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	trace, err := a.cfg.Egress.TraceEgress(r.Context(), req)
	a.answer(w, r, trace, err)
}
