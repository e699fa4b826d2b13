// Package placement gives a sandbox what it has of a Kubernetes cluster: a Pod, its PersistentVolumeClaims,
// where its spec asks for one a headless Service, and the policies that select its Pod. All that is the sandbox's own is owned
// by the Sandbox object, so Kubernetes' garbage collector removes it with that. The Pod's spec is the template's, with the agent beside
// the program of the first container; nothing else that the template says is changed.
//
// It never changes or deletes an object that the sandbox does not own, never runs a second Pod beside a
// first, and reads no state of a Pod: package podrun does.
//
// # The agent
//
// The agent comes from an image volume, or, where the cluster has none, from an init container that copies it
// into an emptyDir. The first container's postStart hook starts it, so the image's entrypoint stays. The Pod holds
// the SHA-256 of the agent's token, not the token: who may read Pods may not use sandboxes.
//
// # Policies
//
// A Pod with sandbox.LabelPolicy is selected by two NetworkPolicies: that of all sandboxes of the namespace, which closes, and
// one that opens what the sandbox may reach. NetworkPolicies add up, so a missing one leaves the Pod closed. The second is
// shared by all sandboxes of its content, unless the content is of a single sandbox. A PodDisruptionBudget of the namespace
// selects the Pods of claimed sandboxes. Policies and Services are read from the cache: without changes a reconcile sends nothing.
//
// It has no locks.
package placement
