// Package apiserver runs a Kubernetes API server inside this process: the generic server of
// k8s.io/apiserver with one typed registry per kind, on an etcd that runs in the process too
// or on one that exists already. It is the only user of the apiserver and etcd packages.
//
// It serves Barchan's kinds and the few of Kubernetes that go with them, and decides nothing
// about sandboxes: defaults and rules are those of the types under api/, and what a node can
// honour is asked of [Config.Admission]. There are no CRDs, no webhooks, no aggregation, and
// no RBAC objects: who may do what is the one table in rules.go.
//
// Our own parts reach it through [Server.RESTConfig], whose transport calls the handlers
// directly: no socket, no TLS and no credentials that could leak. Others reach it over TLS at
// [Config.Listen] with the kubeconfig that [Server.AdminKubeconfig] names.
//
// Two small controllers belong to it, because its promises about deletion need them: package
// gc collects objects whose owners are gone, and namespaces.go empties a namespace before it
// goes.
package apiserver
