package sandbox

import (
	"fmt"
	"hash/fnv"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// LabelID selects what a sandbox has in a cluster: its Pods, claims and Service. Its value is the sandbox's ID, which no
// other sandbox ever has, unlike the hash of upstream's label.
const LabelID = "barchan.dev/sandbox-id"

const (
	// LabelPolicy is on the NetworkPolicies and PodDisruptionBudgets of sandboxes, and selects the Pods of a NetworkPolicy.
	LabelPolicy = "barchan.dev/policy"
	// LabelClaimed is "true" on the Pods of sandboxes that are not members of a pool, which may not be evicted.
	LabelClaimed = "barchan.dev/claimed"
)

// NameHash returns the value of upstream's label agents.x-k8s.io/sandbox-name-hash: FNV-1a of the name, 32
// bits. Two names may share it, so it selects nothing of ours.
func NameHash(name string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	return fmt.Sprintf("%08x", h.Sum32())
}

// PodName returns the name of a sandbox's Pod.
func PodName(s *agents.Sandbox) string {
	if name := s.Annotations[agents.AnnotationPodName]; name != "" {
		return name
	}
	return s.Name
}
