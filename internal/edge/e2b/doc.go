// Package e2b implements the E2B wire format of the control plane. It makes no decisions: a request
// becomes one call of the manager, and the result becomes a response. Package api has the types, the
// routes and the decoding of parameters, request the common part, and there is a package for each family of routes. This
// package authenticates callers and routes requests.
//
// Every unsuccessful response has the body {"code","message"}, where code repeats the HTTP status; one
// table maps kinds of errors to statuses. An error without a public message gets a general text, and
// is logged in full.
package e2b
