package dashboard

import (
	"cmp"
	"net"
	"net/http"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
)

// Actions in the audit log. The REST API records the requests that the page makes of it.
const (
	actionSignIn = "open dashboard"
	actionOpen   = "open terminal"
	actionClose  = "close terminal"
	actionPort   = "open port"
	actionWrite  = "write files"
	actionDelete = "delete files"
)

// record tells the audit log what the holder of a key did.
func (s *Server) record(r *http.Request, who apikeys.Identity, action string, status int) {
	address, _, _ := net.SplitHostPort(r.RemoteAddr)
	s.cfg.Audit.Add(auditlog.Entry{
		By: auditlog.ByKey, Name: who.Key, Namespace: who.Namespace, Action: action, Request: cmp.Or(r.Pattern, r.Method+" "+r.URL.Path),
		Object: r.PathValue("port"), Sandbox: r.PathValue("id"), Address: address, Status: status,
	})
}

// recorded has the audit log record what a handler does, with its status.
func (s *Server) recorded(action string, h handler) handler {
	return func(w http.ResponseWriter, r *http.Request, who caller) error {
		out := &telemetry.StatusRecorder{ResponseWriter: w}
		err := h(out, r, who)
		if err != nil && out.Status == 0 {
			s.Fail(out, r, err)
			err = errSent
		}
		s.record(r, who.Identity, action, cmp.Or(out.Status, http.StatusOK))
		return err
	}
}
