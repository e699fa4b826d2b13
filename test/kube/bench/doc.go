// Package bench measures warm pools and claims on a real kube-apiserver: those of Barchan, and in turns with them those of another
// controller of the same kinds, if there is one to compare with. `make bench-kube` runs it. It has tests alone.
//
// Each turn has a Kubernetes of its own, with the same flags: etcd, kube-apiserver, kube-controller-manager and kube-scheduler. No
// Pod runs: kwok plays the kubelets of all nodes, and makes a Pod ready in one write of its status. Barchan waits for the
// agent in each Pod, so one server at the addresses of all Pods accepts what it sends, and does nothing. What is
// measured is therefore the work of API server and controllers, and neither the start of a container nor that of an agent.
//
// BenchmarkScale measures Barchan alone, with several replicas, beside thousands of sandboxes that run.
package bench
