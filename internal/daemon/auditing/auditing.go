// Package auditing turns what the gateway and the admin socket report into entries of the audit log.
package auditing

import (
	"cmp"
	"net"
	"net/http"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/accesslog"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Gateway returns the gateway's hook for actions in sandboxes; nil without a log.
func Gateway(log *auditlog.Log, routes *route.Table) func(*accesslog.Record) {
	if log == nil {
		return nil
	}
	return func(a *accesslog.Record) {
		host, _, _ := net.SplitHostPort(a.Remote)
		e := auditlog.Entry{
			Time: a.Started, By: auditlog.BySandbox, Action: accesslog.ActionOf(a.Method, a.Path), Request: a.Method + " " + a.Path,
			Sandbox: string(a.Sandbox), Address: host, Status: a.Status,
		}
		if entry, exists := routes.Lookup(a.Sandbox); exists {
			e.Namespace = entry.Namespace
		}
		log.Add(e)
	}
}

// Admin records the requests to the admin socket that change something.
func Admin(log *auditlog.Log, next http.Handler) http.Handler {
	if log == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slices.Contains([]string{http.MethodGet, http.MethodHead}, r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		out := &telemetry.StatusRecorder{ResponseWriter: w}
		defer func() {
			log.Add(auditlog.Entry{By: auditlog.ByAdmin, Action: "administer", Request: r.Method + " " + r.URL.Path, Status: cmp.Or(out.Status, http.StatusOK)})
		}()
		next.ServeHTTP(out, r)
	})
}
