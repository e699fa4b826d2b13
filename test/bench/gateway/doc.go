// Package gateway measures what the gateway adds to a request, beside nginx and haproxy before the same backend, and how soon the
// gateways of other replicas lead to a new sandbox. The proxies and the gateway are processes of their own.
package gateway
