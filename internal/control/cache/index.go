package cache

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	indexSandboxID      = "barchan.sandboxID"
	indexOwner          = "barchan.owner"
	indexMember         = "barchan.member"
	indexOrigin         = "barchan.origin"
	indexIdempotency    = "barchan.idempotency"
	indexKeyHash        = "barchan.keyHash"
	indexPoolTemplate   = "barchan.poolTemplate"
	indexRevisionOf     = "barchan.revisionOf"
	indexClaimPool      = "barchan.claimPool"
	indexRestore        = "barchan.restore"
	indexTemplateOrigin = "barchan.templateOrigin"
	indexUnfinished     = "barchan.unfinished"
	indexWarm           = "barchan.warm"
	indexPodOwner       = "barchan.podOwner"
	indexVolumeID       = "barchan.volumeID"
	indexMounts         = "barchan.mounts"
	indexReference      = "barchan.reference"
	indexSSHKey         = "barchan.sshKey"
	indexTemplateName   = "barchan.templateName"
)

// index finds objects of one kind by a value. The first read by it makes it, so that a process has those that it reads.
type index struct {
	name   string
	object client.Object
	values func(client.Object) []string
}

// of makes an index function from a typed one. An empty value omits the object.
func of[T client.Object](f func(T) string) func(client.Object) []string {
	return func(o client.Object) []string {
		if x, ok := o.(T); ok {
			if v := f(x); v != "" {
				return []string{v}
			}
		}
		return nil
	}
}

func indexes() []index {
	box, swp, claim := &agents.Sandbox{}, &extensions.SandboxWarmPool{}, &extensions.SandboxClaim{}
	return []index{
		{indexSandboxID, box, of(func(s *agents.Sandbox) string { return string(sandbox.IDOf(s.UID)) })},
		{indexOwner, box, of(func(s *agents.Sandbox) string { return string(owner(s)) })},
		{indexMember, box, of(func(s *agents.Sandbox) string { return string(pool.MemberOf(s)) })},
		{indexOrigin, box, of(func(s *agents.Sandbox) string { return string(pool.OriginOf(s)) })},
		{indexIdempotency, box, of(func(s *agents.Sandbox) string { return s.Annotations[pool.AnnotationIdempotencyKey] })},
		{indexKeyHash, &barchan.APIKey{}, of(func(k *barchan.APIKey) string { return k.Spec.SHA256 })},
		{indexSSHKey, &barchan.APIKey{}, sshKeysOf},
		{indexPoolTemplate, swp, of(func(p *extensions.SandboxWarmPool) string { return pool.TemplateOf(p).String() })},
		{indexRevisionOf, &barchan.TemplateRevision{}, of(func(r *barchan.TemplateRevision) string { return r.Spec.TemplateName })},
		{indexClaimPool, claim, of(func(c *extensions.SandboxClaim) string { return c.Spec.WarmPoolRef.Name })},
		{indexRestore, box, of(func(s *agents.Sandbox) string { return originOf(s.Spec.Barchan) })},
		{indexTemplateOrigin, &extensions.SandboxTemplate{}, of(templateOrigin)},
		{indexUnfinished, &barchan.Checkpoint{}, of(unfinished)},
		{indexWarm, &barchan.Checkpoint{}, of(warmUpOf)},
		{indexVolumeID, &barchan.Volume{}, of(func(v *barchan.Volume) string { return sandbox.VolumeIDOf(v.UID) })},
		{indexMounts, box, func(o client.Object) []string {
			if s, ok := o.(*agents.Sandbox); ok {
				return sandbox.VolumesOf(s)
			}
			return nil
		}},
		{indexReference, box, references},
		{indexTemplateName, &extensions.SandboxTemplate{}, templateNames},
		{indexPodOwner, &corev1.Pod{}, of(func(p *corev1.Pod) string { return string(owner(p)) })},
	}
}

// references returns the Secrets and ConfigMaps that a sandbox refers to.
func references(o client.Object) (values []string) {
	s, ok := o.(*agents.Sandbox)
	if !ok {
		return nil
	}
	for _, r := range podsource.References(&s.Spec.PodTemplate.Spec) {
		values = append(values, r.Kind+"/"+r.Name)
	}
	return values
}

// templateNames returns what clients call the template of an object: its name, aliases and ID.
func templateNames(o client.Object) (names []string) {
	if t, ok := o.(*extensions.SandboxTemplate); ok {
		name, _ := t.NameAndTag()
		names = append(names, name, pool.TemplateID(t))
		if b := t.Spec.Barchan; b != nil {
			names = append(names, b.Aliases...)
		}
	}
	return names
}

// sshKeysOf returns the fingerprints of an API key's SSH keys.
func sshKeysOf(o client.Object) (found []string) {
	if k, ok := o.(*barchan.APIKey); ok {
		for _, text := range k.Spec.SSHKeys {
			if fingerprint, err := barchan.SSHFingerprint(text); err == nil {
				found = append(found, fingerprint)
			}
		}
	}
	return found
}

// originOf returns the checkpoint that a sandbox starts from.
func originOf(b *agents.BarchanSpec) string {
	if b == nil || b.Restore == nil {
		return ""
	}
	return b.Restore.CheckpointName
}

func templateOrigin(t *extensions.SandboxTemplate) string {
	if t.Spec.Barchan == nil {
		return ""
	}
	return originOf(t.Spec.Barchan.Sandbox)
}

// unfinished returns the sandbox of a checkpoint that is not taken yet.
func unfinished(c *barchan.Checkpoint) string {
	if c.Spec.Origin == barchan.OriginImport || c.Status.Phase == barchan.CheckpointReady || c.Status.Phase == barchan.CheckpointFailed {
		return ""
	}
	return c.Spec.SandboxName
}

// warmUpOf returns the template of a warm-up checkpoint.
func warmUpOf(c *barchan.Checkpoint) string {
	if c.Labels[barchan.LabelPurpose] != barchan.PurposeWarm {
		return ""
	}
	return pool.TemplateKey(c).String()
}

func owner(o metav1.Object) types.UID {
	if ref := metav1.GetControllerOfNoCopy(o); ref != nil {
		return ref.UID
	}
	return ""
}
