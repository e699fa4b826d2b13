// Package kube verifies that our controllers work on Kubernetes' API server as on the embedded one:
// it installs our CRDs in a real kube-apiserver with a real etcd, holds its verdicts against
// those of the embedded server, and runs the suites of the controllers there. It has tests
// alone; each server that they start has an address, a directory and certificates of its own
// and is gone when its test ends.
//
// The suites run beside Kubernetes' own controllers where make test-kube has built these. Elsewhere there is no
// controller-manager: nothing collects garbage and no namespace goes away, so what depends on either is tested on the embedded
// server, which does both itself. Nothing enforces NetworkPolicies: tests verify their content.
package kube
