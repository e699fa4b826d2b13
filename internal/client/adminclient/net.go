package adminclient

import (
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"time"
)

// Routes of the administration of addresses.
const (
	PathLeases  = "/v1/net/leases"
	PathSubnets = "/v1/net/subnets"
	PathFree    = "/v1/net/quarantine" // DELETE PathFree/{address}
	PathCheck   = "/v1/net/check"
	PathTrace   = "/v1/net/trace"
)

// Lease is an address in the lease table.
type Lease struct {
	Address netip.Addr `json:"address"`
	// Address6 is its IPv6 address; the zero value without IPv6.
	Address6 netip.Addr `json:"address6,omitzero"`
	// State is reserved, held, quarantined or cooling.
	State string `json:"state"`
	// Owner is a sandbox's UID, and Sandbox its ID; both are empty for quarantined and cooling ones.
	Owner   string `json:"owner,omitempty"`
	Sandbox string `json:"sandboxID,omitempty"`
	// Name is the sandbox's namespace/name; empty if unknown.
	Name  string    `json:"name,omitempty"`
	Since time.Time `json:"since"`
	// Until is when a cooling address becomes free; the zero time for others.
	Until time.Time `json:"until,omitzero"`
	// Reason is why an address is quarantined.
	Reason string `json:"reason,omitempty"`
}

// Subnet counts the addresses of a subnet by state.
type Subnet struct {
	Subnet netip.Prefix `json:"subnet"`
	// Subnet6 is its IPv6 subnet; the zero value without IPv6.
	Subnet6 netip.Prefix `json:"subnet6,omitzero"`
	// Current means that addresses are allocated from it. Total, Excluded and Free are zero for
	// others.
	Current     bool `json:"current"`
	Total       int  `json:"total"`
	Excluded    int  `json:"excluded"`
	Free        int  `json:"free"`
	Reserved    int  `json:"reserved"`
	Held        int  `json:"held"`
	Quarantined int  `json:"quarantined"`
	Cooling     int  `json:"cooling"`
	// Unread counts addresses that are not allocated because their row cannot be read.
	Unread int `json:"unread"`
}

// RepairConflict is the Kind of a Repair that changed nothing: an operator must stop one of the users
// of the address.
const RepairConflict = "conflict"

// Repair is a difference between the lease table and the addresses in use, and the action taken.
type Repair struct {
	// Kind is reclaimed, released, quarantined or RepairConflict.
	Kind    string     `json:"kind"`
	Address netip.Addr `json:"address"`
	Owner   string     `json:"owner,omitempty"`
	Sandbox string     `json:"sandboxID,omitempty"`
	// Where is where the address was seen in use.
	Where  string `json:"where,omitempty"`
	Detail string `json:"detail"`
}

// TraceRequest requests the egress rule that applies to a packet.
type TraceRequest struct {
	Sandbox string `json:"sandboxID"`
	// Destination is an address or a domain name.
	Destination string `json:"destination"`
	Port        uint16 `json:"port"`
	// Protocol is tcp, udp or another name in lower case.
	Protocol string `json:"protocol"`
}

// Trace is the response to a TraceRequest.
type Trace struct {
	TraceRequest
	// Verdict is allowed, refused, or resolver, which means that Barchan's own resolver receives it.
	Verdict string `json:"verdict"`
	// Rule is the deciding rule, for users.
	Rule string `json:"rule"`
	// Source is whose rule it is: the sandbox's own policy, that of its template, or the host's.
	Source string `json:"source"`
}

// Leases lists the addresses that are not free.
func (c *Client) Leases(ctx context.Context) ([]Lease, error) {
	return get[[]Lease](ctx, c, PathLeases)
}

// Subnets counts addresses, the current subnet first.
func (c *Client) Subnets(ctx context.Context) ([]Subnet, error) {
	return get[[]Subnet](ctx, c, PathSubnets)
}

// FreeAddress ends the quarantine of an address. One that is not quarantined is an errs.ErrConflict
// that names its owner.
func (c *Client) FreeAddress(ctx context.Context, addr netip.Addr) error {
	return c.change(ctx, http.MethodDelete, PathFree+"/"+url.PathEscape(addr.String()))
}

// CheckAddresses reconciles the lease table with the addresses in use, now.
func (c *Client) CheckAddresses(ctx context.Context) ([]Repair, error) {
	return post[[]Repair](ctx, c, PathCheck, struct{}{})
}

// TraceEgress returns the egress rule that applies to a packet. Nothing is sent.
func (c *Client) TraceEgress(ctx context.Context, req TraceRequest) (Trace, error) {
	return post[Trace](ctx, c, PathTrace, req)
}
