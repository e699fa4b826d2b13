// Package placement gives a sandbox what it has of a Kubernetes cluster: a Pod, its PersistentVolumeClaims
// and, where its spec asks for one, a headless Service. All of them are owned by the Sandbox object, so
// Kubernetes' garbage collector removes them with it. The Pod's spec is the template's, with the agent beside
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
// It has no locks.
package placement
