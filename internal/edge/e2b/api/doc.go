// Package api has the types, the routes and the decoding of parameters of the E2B API, all of it generated from openapi.yaml.
// It has no behaviour of its own.
package api

//go:generate ./generate.sh
