package kinds

import (
	"strings"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	resourceapi "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// All returns every stored kind.
func All() []*Resource {
	return append(own(), namespaceKind(), secretKind(), configMapKind(), leaseKind(), eventKind())
}

// own returns Barchan's kinds and those of agent-sandbox.
func own() []*Resource {
	return []*Resource{sandboxKind(), templateKind(), warmPoolKind(), claimKind(), checkpointKind(), apiKeyKind(), templateRevisionKind(), templateBuildKind(), volumeKind()}
}

func sandboxKind() *Resource {
	return &Resource{
		GV: agents.GroupVersion, Plural: "sandboxes", Kind: "Sandbox", ShortNames: []string{"sandbox"},
		Object: &agents.Sandbox{}, List: &agents.SandboxList{},
		Namespaced: true, Status: true, Generation: true,
		Defaults: on(agents.SetDefaults),
		Validate: checkedChange(agents.Validate),
		fields: selectable(func(s *agents.Sandbox) fields.Set {
			set := fields.Set{"spec.operatingMode": string(s.Spec.OperatingMode), "status.barchan.phase": ""}
			if s.Status.Barchan != nil {
				set["status.barchan.phase"] = s.Status.Barchan.Phase
			}
			return set
		}),
		columns: []column{
			text("Ready", func(s *agents.Sandbox) string { return string(ready(s.Status.Conditions).Status) }),
			text("Reason", func(s *agents.Sandbox) string { return ready(s.Status.Conditions).Reason }),
			ageColumn(),
		},
	}
}

func templateKind() *Resource {
	return &Resource{
		GV: extensions.GroupVersion, Plural: "sandboxtemplates", Kind: "SandboxTemplate", ShortNames: []string{"sandboxtemplate"},
		Object: &extensions.SandboxTemplate{}, List: &extensions.SandboxTemplateList{},
		Namespaced: true, Generation: true,
		Defaults: on(extensions.SetTemplateDefaults),
		Validate: checkedChange(extensions.ValidateTemplateChange),
		Warn:     func(o runtime.Object) []string { return extensions.TemplateWarnings(o.(*extensions.SandboxTemplate)) },
		columns: []column{
			text("Template", func(t *extensions.SandboxTemplate) string { return tagOf(t).TemplateName }),
			text("Tag", func(t *extensions.SandboxTemplate) string { return tagOf(t).Tag }),
			ageColumn(),
		},
	}
}

// tagOf returns which tag a template is; empty for none.
func tagOf(t *extensions.SandboxTemplate) extensions.TagOf {
	if b := t.Spec.Barchan; b != nil && b.TagOf != nil {
		return *b.TagOf
	}
	return extensions.TagOf{}
}

func warmPoolKind() *Resource {
	return &Resource{
		GV: extensions.GroupVersion, Plural: "sandboxwarmpools", Kind: "SandboxWarmPool", ShortNames: []string{"swp"},
		Object: &extensions.SandboxWarmPool{}, List: &extensions.SandboxWarmPoolList{},
		Namespaced: true, Status: true, Generation: true,
		Defaults: on(extensions.SetWarmPoolDefaults),
		Validate: checked(extensions.ValidateWarmPool),
		columns: []column{
			number("Ready", func(p *extensions.SandboxWarmPool) int64 { return int64(p.Status.ReadyReplicas) }),
			number("Desired", func(p *extensions.SandboxWarmPool) int64 { return int64(desired(p)) }),
			ageColumn(),
			wide(text("Revision", func(p *extensions.SandboxWarmPool) string { return p.Status.CurrentRevision })),
			wide(text("Status", func(p *extensions.SandboxWarmPool) string {
				return condition(p.Status.Conditions, extensions.PoolProgressing).Reason
			})),
		},
		Scale: &Scale{
			Get: func(o runtime.Object) (s autoscalingv1.Scale) {
				p := o.(*extensions.SandboxWarmPool)
				s.Spec.Replicas, s.Status.Replicas, s.Status.Selector = desired(p), p.Status.Replicas, p.Status.Selector
				return s
			},
			Set: func(o runtime.Object, replicas int32) { o.(*extensions.SandboxWarmPool).Spec.Replicas = &replicas },
		},
	}
}

// desired is the size in a pool's spec; stored pools have their defaults.
func desired(p *extensions.SandboxWarmPool) int32 { return ptr.Deref(p.Spec.Replicas, 0) }

func claimKind() *Resource {
	return &Resource{
		GV: extensions.GroupVersion, Plural: "sandboxclaims", Kind: "SandboxClaim", ShortNames: []string{"sandboxclaim"},
		Object: &extensions.SandboxClaim{}, List: &extensions.SandboxClaimList{},
		Namespaced: true, Status: true, Generation: true,
		Defaults: on(extensions.SetClaimDefaults),
		Validate: checked(extensions.ValidateClaim),
		columns: []column{
			text("Ready", func(c *extensions.SandboxClaim) string { return string(ready(c.Status.Conditions).Status) }),
			text("Sandbox", func(c *extensions.SandboxClaim) string { return c.Status.Sandbox.Name }),
			text("Reason", func(c *extensions.SandboxClaim) string { return ready(c.Status.Conditions).Reason }),
			ageColumn(),
		},
	}
}

func checkpointKind() *Resource {
	return &Resource{
		GV: barchan.GroupVersion, Plural: "checkpoints", Kind: "Checkpoint", ShortNames: []string{"ckpt"},
		Object: &barchan.Checkpoint{}, List: &barchan.CheckpointList{},
		Namespaced: true, Status: true, Generation: true,
		Defaults: on(barchan.SetCheckpointDefaults),
		Validate: checkedChange(barchan.ValidateCheckpoint),
		columns: []column{
			text("ID", func(c *barchan.Checkpoint) string { return c.Status.SnapshotID }),
			text("Sandbox", func(c *barchan.Checkpoint) string { return c.Spec.SandboxName }),
			text("Phase", func(c *barchan.Checkpoint) string { return string(c.Status.Phase) }),
			text("Content", func(c *barchan.Checkpoint) string { return string(c.Status.Content) }),
			text("Size", func(c *barchan.Checkpoint) string { return size(c.Status.Size) }),
			wide(text("Memory", func(c *barchan.Checkpoint) string { return size(c.Status.MemorySize) })),
			wide(text("Reason", func(c *barchan.Checkpoint) string { return ready(c.Status.Conditions).Reason })),
			ageColumn(),
		},
	}
}

func size(q *resourceapi.Quantity) string {
	if q == nil {
		return ""
	}
	return q.String()
}

func apiKeyKind() *Resource {
	return &Resource{
		GV: barchan.GroupVersion, Plural: "apikeys", Kind: "APIKey",
		Object: &barchan.APIKey{}, List: &barchan.APIKeyList{},
		Namespaced: true, Status: true, Generation: true,
		Validate: checked(barchan.ValidateAPIKey),
		fields:   selectable(func(k *barchan.APIKey) fields.Set { return fields.Set{"spec.sha256": k.Spec.SHA256} }),
		columns: []column{
			text("Prefix", func(k *barchan.APIKey) string { return k.Spec.Prefix }),
			text("Description", func(k *barchan.APIKey) string { return k.Spec.Description }),
			text("Scope", func(k *barchan.APIKey) string { return string(k.Spec.Scope) }),
			text("Expires", func(k *barchan.APIKey) string {
				if k.Spec.ExpiresAt == nil {
					return ""
				}
				return k.Spec.ExpiresAt.UTC().Format(time.RFC3339)
			}),
			date("Last used", func(k *barchan.APIKey) metav1.Time { return ptr.Deref(k.Status.LastUsedAt, metav1.Time{}) }),
			ageColumn(),
		},
	}
}

func templateRevisionKind() *Resource {
	return &Resource{
		GV: barchan.GroupVersion, Plural: "templaterevisions", Kind: "TemplateRevision", ShortNames: []string{"trev"},
		Object: &barchan.TemplateRevision{}, List: &barchan.TemplateRevisionList{},
		Namespaced: true, Generation: true,
		Validate: checkedChange(barchan.ValidateTemplateRevision),
		columns: []column{
			text("Template", func(t *barchan.TemplateRevision) string { return t.Spec.TemplateName }),
			number("Number", func(t *barchan.TemplateRevision) int64 { return t.Spec.Number }),
			text("Revision", func(t *barchan.TemplateRevision) string { return t.Spec.Revision }),
			ageColumn(),
		},
	}
}

func templateBuildKind() *Resource {
	return &Resource{
		GV: barchan.GroupVersion, Plural: "templatebuilds", Kind: "TemplateBuild", ShortNames: []string{"tbuild"},
		Object: &barchan.TemplateBuild{}, List: &barchan.TemplateBuildList{},
		Namespaced: true, Status: true, Generation: true,
		Validate: checkedChange(barchan.ValidateTemplateBuild),
		columns: []column{
			text("Template", func(b *barchan.TemplateBuild) string { return b.Spec.TemplateName }),
			text("Tags", func(b *barchan.TemplateBuild) string { return strings.Join(b.Spec.Tags, ",") }),
			text("Phase", func(b *barchan.TemplateBuild) string { return string(b.Status.Phase) }),
			positive("Step", func(b *barchan.TemplateBuild) int64 { return int64(b.Status.Step) }),
			wide(positive("Cached", func(b *barchan.TemplateBuild) int64 { return int64(b.Status.CachedSteps) })),
			ageColumn(),
		},
	}
}

func volumeKind() *Resource {
	return &Resource{
		GV: barchan.GroupVersion, Plural: "volumes", Kind: "Volume", ShortNames: []string{"bvol"},
		Object: &barchan.Volume{}, List: &barchan.VolumeList{},
		Namespaced: true, Status: true, Generation: true,
		Defaults: on(barchan.SetVolumeDefaults),
		Validate: checkedChange(barchan.ValidateVolume),
		columns: []column{
			text("ID", func(v *barchan.Volume) string { return v.Status.VolumeID }),
			text("Phase", func(v *barchan.Volume) string { return string(v.Status.Phase) }),
			text("Capacity", func(v *barchan.Volume) string { return size(v.Status.Capacity) }),
			text("Used", func(v *barchan.Volume) string { return size(v.Status.Used) }),
			positive("Sandboxes", func(v *barchan.Volume) int64 { return int64(v.Status.Sandboxes) }),
			wide(text("Reason", func(v *barchan.Volume) string { return ready(v.Status.Conditions).Reason })),
			ageColumn(),
		},
	}
}
