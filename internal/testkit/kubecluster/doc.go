// Package kubecluster runs a real Kubernetes for tests. [StartServer] starts a kube-apiserver
// alone, on the loopback device and without root. [Start] starts a whole cluster: etcd,
// kube-apiserver, kube-controller-manager, kube-scheduler and, if the test asks for nodes,
// kubelets, each with a containerd of its own, which run Pods with runc and gVisor, and CoreDNS.
//
// A cluster has PID, network and mount namespaces of its own, a second node others. In them are the addresses of its
// API server and Pods, /proc, /run, /tmp, /var/lib and /var/log of its own, and copies of the kernel
// settings that a kubelet would change. Outside it has a directory, a cgroup in each hierarchy and
// a listener on the loopback device. It changes nothing else of the machine, and clusters run side
// by side. When the test or its process ends, the kernel kills all programs of the cluster.
//
// There is no kube-proxy: of Services only kubernetes.default and headless ones answer.
package kubecluster
