package pool

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// form is the version of the canonical form. Raise it for an intended change of the form. Any change
// rolls every pool.
const form = 1

// content is the part of a template that decides what runs. Its JSON is hashed.
type content struct {
	Form      int                     `json:"form"`
	Blueprint agents.SandboxBlueprint `json:"blueprint"`
	Network   networkContent          `json:"network"`
	Reach     *agents.EgressPolicy    `json:"reach,omitempty"`
	OpenAgent bool                    `json:"openAgent,omitempty"`
	// DefaultUser is part of the agent's configuration at its start.
	DefaultUser string `json:"defaultUser,omitempty"`
	// Restore and WarmUp are what members start from, and what is run in them first.
	Restore *agents.RestoreSource `json:"restore,omitempty"`
	WarmUp  *agents.WarmUp        `json:"warmUp,omitempty"`
}

// networkContent is the network policy in force.
type networkContent struct {
	// Policy is "default", the built-in one; "none", if the template's is ignored; or "kept", which
	// follows. It was "own" while members were not kept to it yet.
	Policy  string                                  `json:"policy"`
	Ingress []networkingv1.NetworkPolicyIngressRule `json:"ingress,omitempty"`
	Egress  []networkingv1.NetworkPolicyEgressRule  `json:"egress,omitempty"`
}

// revisionText is base 32 with digits first, in lower case: 52 characters for SHA-256, which
// fit a label as hex would not.
var revisionText = base32.NewEncoding("0123456789abcdefghijklmnopqrstuv").WithPadding(base32.NoPadding)

// Revision returns the SHA-256 of the fields that decide what a template's sandboxes run, as 52
// lower-case letters and digits, and the canonical JSON that was hashed. Two templates that differ in
// what they run never share it; two that differ in spelling alone do, as far as listed here. In doubt the
// form distinguishes: that costs a roll of the pool, the opposite a stale sandbox.
//
// Part of it are podTemplate.spec, volumeClaimTemplates (names and specs), service, the network
// policy in force, spec.barchan.sandbox.network, and access.openAgent, since an agent is
// started with its token or without; and of spec.barchan.sandbox what the sandboxes start from and by whom:
// restore, by the checkpoint's name, warmUp and defaultUser.
//
// No part of it are the template's own metadata and podTemplate.metadata, the labels and
// annotations of volume claims, the policies on what claims may bring, aliases and visibility,
// and what of spec.barchan.sandbox acts on a claimed sandbox only: metadata, timeouts,
// suspension, wake, the rest of access. [Refresh] brings those to a member.
//
// The same are:
//   - an empty list or map and none; a quantity and its equals (1Gi, 1024Mi, 1073741824)
//   - absent and dnsPolicy ClusterFirst, schedulerName default-scheduler, serviceAccountName
//     default (by either of its names), terminationGracePeriodSeconds 30, enableServiceLinks
//     true, automountServiceAccountToken false (no sandbox gets a token by default),
//     shareProcessNamespace false, setHostnameAsFQDN false, hostUsers true, preemptionPolicy
//     PreemptLowerPriority; an empty runtimeClassName, securityContext, dnsConfig or affinity
//   - absent and, of a container, imagePullPolicy IfNotPresent with any tag (the node's
//     rule), terminationMessagePath /dev/termination-log and -Policy File, protocol TCP of a
//     port, an empty securityContext or capabilities, privileged false, readOnlyRootFilesystem
//     false, procMount Default, apiVersion v1 of a fieldRef, and a probe's timeoutSeconds 1,
//     periodSeconds 10, successThreshold 1, failureThreshold 3, scheme HTTP, path /
//   - absent and volumeMode Filesystem of a volume claim, protocol TCP in a network policy
//   - absent and, of a warmUp, timeoutSeconds 300
//   - no spec.barchan.sandbox.network and one that allows the internet and lists nothing
//
// Distinguished, against expectation:
//   - no restartPolicy and Always: without one, a sandbox outlives its entrypoint
//   - no runtimeClassName and gvisor: the node's configuration decides the former
//   - no service and false: the former leaves a Service that exists, the latter deletes it
//   - no networkPolicy (the secure default), an empty one (all denied) and Unmanaged
//   - requests that equal limits and no requests: the node's defaults apply to the latter
//   - the order of lists, that of env in particular, where a later name wins
func Revision(t *extensions.SandboxTemplate) (revision string, canonical []byte, err error) {
	t = t.DeepCopy()
	c := content{Form: form, Blueprint: t.Spec.SandboxBlueprint, Network: networkOf(t)}
	c.Blueprint.PodTemplate.ObjectMeta = agents.PodMetadata{}
	canonPod(&c.Blueprint.PodTemplate.Spec)
	for i := range c.Blueprint.VolumeClaimTemplates {
		canonClaim(&c.Blueprint.VolumeClaimTemplates[i])
	}
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		c.Reach = canonReach(b.Sandbox.Network)
		c.OpenAgent = b.Sandbox.Access != nil && b.Sandbox.Access.OpenAgent
		c.Restore, c.WarmUp, c.DefaultUser = b.Sandbox.Restore, b.Sandbox.WarmUp, b.Sandbox.DefaultUser
		if c.WarmUp != nil {
			fill(&c.WarmUp.TimeoutSeconds, agents.DefaultWarmUpSeconds)
		}
	}
	tidy(&c)
	canonical, err = json.Marshal(c)
	if err != nil {
		return "", nil, fmt.Errorf("revision of template %s/%s: %w", t.Namespace, t.Name, err)
	}
	sum := sha256.Sum256(canonical)
	return revisionText.EncodeToString(sum[:]), canonical, nil
}

func networkOf(t *extensions.SandboxTemplate) networkContent {
	switch p := extensions.ManagedPolicy(t); {
	case t.Spec.NetworkPolicyManagement == extensions.NetworkUnmanaged:
		return networkContent{Policy: "none"}
	case p == nil:
		return networkContent{Policy: "default"}
	default:
		for i := range p.Ingress {
			canonPolicyPorts(p.Ingress[i].Ports)
		}
		for i := range p.Egress {
			canonPolicyPorts(p.Egress[i].Ports)
		}
		return networkContent{Policy: "kept", Ingress: p.Ingress, Egress: p.Egress}
	}
}
