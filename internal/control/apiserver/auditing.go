package apiserver

import (
	"cmp"
	"net"
	"net/http"
	"net/url"
	"slices"

	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
)

// auditPolicy selects the writes and the streams into sandboxes of people and tenants. It never asks for bodies.
type auditPolicy struct{}

var _ audit.PolicyRuleEvaluator = auditPolicy{}

// EvaluatePolicyRule implements audit.PolicyRuleEvaluator.
func (auditPolicy) EvaluatePolicyRule(a authorizer.Attributes) audit.RequestAuditConfig {
	ours := []string{UserController, UserNode}
	stream := a.GetSubresource() == "exec" || a.GetSubresource() == "portforward"
	if !a.IsResourceRequest() || a.GetUser() == nil || slices.Contains(ours, a.GetUser().GetName()) || !stream && !slices.Contains(write, a.GetVerb()) {
		return audit.RequestAuditConfig{Level: auditinternal.LevelNone}
	}
	return audit.RequestAuditConfig{
		Level: auditinternal.LevelMetadata, OmitStages: []auditinternal.Stage{auditinternal.StageRequestReceived, auditinternal.StageResponseStarted},
	}
}

// auditSink writes the library's events to our log.
type auditSink struct{ log *auditlog.Log }

var _ audit.Sink = auditSink{}

// ProcessEvents implements audit.Sink.
func (s auditSink) ProcessEvents(events ...*auditinternal.Event) bool {
	for _, e := range events {
		s.log.Add(auditEntry(e))
	}
	return true
}

func auditEntry(e *auditinternal.Event) auditlog.Entry {
	out := auditlog.Entry{Time: e.RequestReceivedTimestamp.Time, By: auditlog.ByUser, Name: e.User.Username, Action: e.Verb}
	if key := e.User.Extra[tenancy.ExtraKey]; len(key) == 1 {
		out.By, out.Name = auditlog.ByKey, key[0]
	}
	if uri, err := url.ParseRequestURI(e.RequestURI); err == nil { // exec has the command in its query
		out.Request = uri.Path
	}
	if o := e.ObjectRef; o != nil {
		resource := o.Resource
		if o.Subresource != "" {
			resource += "/" + o.Subresource
		}
		out.Action, out.Namespace, out.Object = e.Verb+" "+resource, o.Namespace, o.Name
		if o.Subresource == "exec" || o.Subresource == "portforward" { // kubectl gets them or creates them, by its version
			out.Action = o.Subresource + " " + o.Resource
		}
	}
	if len(e.SourceIPs) > 0 {
		out.Address = e.SourceIPs[len(e.SourceIPs)-1] // the peer's; those before it are what the client says
	}
	if e.ResponseStatus != nil {
		out.Status = cmp.Or(int(e.ResponseStatus.Code), http.StatusOK)
	}
	if net.ParseIP(out.Address) == nil {
		out.Address = ""
	}
	return out
}
