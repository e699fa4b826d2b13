// Package podrun runs sandboxes as Pods of a Kubernetes cluster: it is a controllers.Runner over package
// placement, for every RuntimeClass. A Pod is the sandbox; kubelet starts it, restarts its containers and
// runs its probes.
//
// A Pod has no memory to keep: a suspended sandbox has no Pod, and keeps its volumes only. What asks for more is
// refused by the name of the field. Nothing is undone here, and nothing is removed that Kubernetes' garbage
// collector removes.
//
// # Readiness
//
// A sandbox runs when its Pod runs and its agent has accepted the sandbox's token. The agent gets the token, and the environment of
// a claim, once for each start of its container: status.barchan.startedAt is the start whose agent has it. A stranger that got the Pod's
// address meanwhile receives neither: the agent first proves that it knows the hash of the token, which is in its Pod (package identity).
//
// # Locks
//
// Runner.mu is a leaf.
package podrun
