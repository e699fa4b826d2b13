// Package e2b speaks the E2B wire format of the control plane. It decides nothing: a request
// becomes one call on the manager, and what comes back becomes a response. Types, routes and
// the decoding of parameters are generated from openapi.yaml.
//
// Every answer that is not a success has the body {"code","message"}, where code repeats the
// HTTP status; one table maps kinds of errors to statuses. What has no public message is told
// in general words, and in full to the log.
package e2b

//go:generate ./generate.sh
