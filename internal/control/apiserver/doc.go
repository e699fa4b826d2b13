// Package apiserver runs a Kubernetes API server inside this process: the generic server of
// k8s.io/apiserver over the storage of packages registry and etcd. It is the only user of the
// apiserver and etcd packages.
//
// It decides nothing about sandboxes: defaults and rules are those of the types under api/, and
// [Config.Admission] refuses what a node cannot honour. There are no CRDs, webhooks, aggregation
// or RBAC objects: the table in rules.go has all rights.
//
// The other parts of this process reach it through [Server.RESTConfig], whose transport calls
// the handlers directly, without socket, TLS or credentials. Others reach it over TLS at
// [Config.Listen] with the kubeconfig that [Server.AdminKubeconfig] names.
//
// Its parts: kinds describes what is served, registry stores it in etcd, pods shows Sandboxes as
// Pods, tenancy bounds what API keys write and have in progress, gc deletes, and liblog has the libraries' logs.
//
// Locks: Server.mu serializes start and stop; nothing else is locked under it but a response.
package apiserver
