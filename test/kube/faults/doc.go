// Package faults has a cluster's faults happen while sandboxes are claimed, and verifies that no claim, no sandbox and no request notices more than a
// delay. It has tests alone.
//
// etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and two controllers and two replicas of Barchan are real; kubelets and agents are
// those of package kubefakes. The history of each sandbox and claim is read from etcd, without a gap.
//
// Not here: a stopped kubelet, a node without power, an API server away for long, and a route that leads to a stranger (package cluster, with
// real kubelets).
package faults
