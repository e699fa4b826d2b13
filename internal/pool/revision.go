package pool

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"fmt"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// content is all of a template that decides what runs. Its JSON is what is hashed.
type content struct {
	Blueprint     agents.SandboxBlueprint           `json:"blueprint"`
	NetworkPolicy *extensions.TemplateNetworkPolicy `json:"networkPolicy,omitempty"`
	Unmanaged     bool                              `json:"networkUnmanaged,omitempty"`
	Egress        *agents.EgressPolicy              `json:"egress,omitempty"`
}

// revisionText is base 32 with digits first, in lower case: 52 characters for SHA-256, which
// fit a label as hex would not.
var revisionText = base32.NewEncoding("0123456789abcdefghijklmnopqrstuv").WithPadding(base32.NoPadding)

// Revision is the SHA-256 of what decides what a template's sandboxes run, and the canonical
// JSON that was hashed. Names, labels and annotations are no part of it.
func Revision(t *extensions.SandboxTemplate) (revision string, canonical []byte, err error) {
	c := content{Blueprint: *t.Spec.SandboxBlueprint.DeepCopy()}
	c.Blueprint.PodTemplate.ObjectMeta = agents.PodMetadata{}
	c.Unmanaged = t.Spec.NetworkPolicyManagement == extensions.NetworkUnmanaged
	if !c.Unmanaged {
		c.NetworkPolicy = t.Spec.NetworkPolicy
	}
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		c.Egress = b.Sandbox.Network
	}
	canonical, err = json.Marshal(c)
	if err != nil {
		return "", nil, fmt.Errorf("revision of template %s/%s: %w", t.Namespace, t.Name, err)
	}
	sum := sha256.Sum256(canonical)
	return revisionText.EncodeToString(sum[:]), canonical, nil
}
