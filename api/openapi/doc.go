// Package openapi holds the OpenAPI definitions of every type that the embedded API server
// serves: our own kinds and the few of Kubernetes that go with them. All but this file is
// generated from the types by api/generate.sh; nothing here is edited by hand.
package openapi
