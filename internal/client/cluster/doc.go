// Package cluster installs Barchan on a Kubernetes cluster, and removes it again.
//
// What is installed is a Helm chart, which this program has inside and renders as Helm does, so that the same objects result from
// Helm, from [Render] and from [Install]. An installation is recorded in the ConfigMap barchan-install: its values, and all objects
// that it has created. The record is written before the objects are, so that an interrupted installation or removal can be repeated:
// nothing is left that is not in the record.
//
// Everything runs with the rights of the caller's kubeconfig.
package cluster
