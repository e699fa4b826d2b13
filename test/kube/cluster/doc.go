// Package cluster verifies the Kubernetes that tests run on: what its control plane does alone, and that
// a node runs Pods with runc and gVisor. It has tests alone.
package cluster
