package e2b

import (
	"cmp"
	"net"
	"net/http"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// record tells the audit log what a known caller changed, or was refused. Of others there may be any number.
func (s *Server) record(w *telemetry.StatusRecorder, r *http.Request, route string, who request.Caller) {
	access := rightsOf[route].access
	if s.audit == nil || who.Namespace == "" || slices.Contains([]string{"", "get", "list"}, access.Verb) {
		return
	}
	noun := access.Resource.Resource
	if access.Resource == secretResource {
		noun = "webhooks"
	}
	e := auditlog.Entry{
		By: auditlog.ByKey, Name: who.Key, Namespace: who.Namespace, Action: access.Verb + " " + noun, Request: route,
		Sandbox: r.PathValue("sandboxID"), Made: *who.Made, Status: w.Status,
	}
	if who.Key == "" {
		e.By = auditlog.ByToken
	}
	for _, name := range []string{"templateID", "volumeID", "apiKeyID", "accessTokenID", "webhookID"} {
		e.Object = cmp.Or(e.Object, r.PathValue(name))
	}
	e.Address, _, _ = net.SplitHostPort(r.RemoteAddr)
	s.audit.Add(e)
}
