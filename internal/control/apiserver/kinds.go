package apiserver

import (
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	resourceapi "k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// ownKinds are Barchan's kinds and those of agent-sandbox.
func ownKinds() []*resource {
	return []*resource{sandboxKind(), templateKind(), warmPoolKind(), claimKind(), checkpointKind(), apiKeyKind(), templateRevisionKind()}
}

func sandboxKind() *resource {
	r := &resource{
		gv: agents.GroupVersion, plural: "sandboxes", kind: "Sandbox", shortNames: []string{"sandbox"},
		namespaced: true, status: true, generation: true,
		defaults: on(agents.SetDefaults),
		validate: checkedChange(agents.Validate),
		fields: selectable(func(s *agents.Sandbox) fields.Set {
			set := fields.Set{"spec.operatingMode": string(s.Spec.OperatingMode), "status.barchan.phase": ""}
			if s.Status.Barchan != nil {
				set["status.barchan.phase"] = s.Status.Barchan.Phase
			}
			return set
		}),
		columns: []column{
			text("Ready", func(s *agents.Sandbox) string {
				return string(ready(s.Status.Conditions).Status)
			}),
			text("Reason", func(s *agents.Sandbox) string {
				return ready(s.Status.Conditions).Reason
			}),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[agents.Sandbox, agents.SandboxList]()
	return r
}

func templateKind() *resource {
	r := &resource{
		gv: extensions.GroupVersion, plural: "sandboxtemplates", kind: "SandboxTemplate", shortNames: []string{"sandboxtemplate"},
		namespaced: true, generation: true,
		defaults: on(extensions.SetTemplateDefaults),
		validate: checked(extensions.ValidateTemplate),
		warn:     func(o runtime.Object) []string { return extensions.TemplateWarnings(o.(*extensions.SandboxTemplate)) },
		columns:  []column{ageColumn()},
	}
	r.newObject, r.newList = object[extensions.SandboxTemplate, extensions.SandboxTemplateList]()
	return r
}

func warmPoolKind() *resource {
	r := &resource{
		gv: extensions.GroupVersion, plural: "sandboxwarmpools", kind: "SandboxWarmPool", shortNames: []string{"swp"},
		namespaced: true, status: true, generation: true,
		defaults: on(extensions.SetWarmPoolDefaults),
		validate: checked(extensions.ValidateWarmPool),
		columns: []column{
			number("Ready", func(p *extensions.SandboxWarmPool) int64 { return int64(p.Status.ReadyReplicas) }),
			number("Desired", func(p *extensions.SandboxWarmPool) int64 { return int64(desired(p)) }),
			ageColumn(),
			wide(text("Revision", func(p *extensions.SandboxWarmPool) string { return p.Status.CurrentRevision })),
			wide(text("Status", func(p *extensions.SandboxWarmPool) string {
				return condition(p.Status.Conditions, extensions.PoolProgressing).Reason
			})),
		},
		scale: &scalable{
			get: func(o runtime.Object) (s autoscalingv1.Scale) {
				p := o.(*extensions.SandboxWarmPool)
				s.Spec.Replicas, s.Status.Replicas, s.Status.Selector = desired(p), p.Status.Replicas, p.Status.Selector
				return s
			},
			set: func(o runtime.Object, replicas int32) { o.(*extensions.SandboxWarmPool).Spec.Replicas = &replicas },
		},
	}
	r.newObject, r.newList = object[extensions.SandboxWarmPool, extensions.SandboxWarmPoolList]()
	return r
}

// desired is a pool's wished size; stored pools have their defaults.
func desired(p *extensions.SandboxWarmPool) int32 {
	if p.Spec.Replicas == nil {
		return 0
	}
	return *p.Spec.Replicas
}

func claimKind() *resource {
	r := &resource{
		gv: extensions.GroupVersion, plural: "sandboxclaims", kind: "SandboxClaim", shortNames: []string{"sandboxclaim"},
		namespaced: true, status: true, generation: true,
		defaults: on(extensions.SetClaimDefaults),
		validate: checked(extensions.ValidateClaim),
		columns: []column{
			text("Ready", func(c *extensions.SandboxClaim) string {
				return string(ready(c.Status.Conditions).Status)
			}),
			text("Sandbox", func(c *extensions.SandboxClaim) string { return c.Status.Sandbox.Name }),
			text("Reason", func(c *extensions.SandboxClaim) string {
				return ready(c.Status.Conditions).Reason
			}),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[extensions.SandboxClaim, extensions.SandboxClaimList]()
	return r
}

func checkpointKind() *resource {
	r := &resource{
		gv: barchan.GroupVersion, plural: "checkpoints", kind: "Checkpoint", shortNames: []string{"ckpt"},
		namespaced: true, status: true, generation: true,
		defaults: on(barchan.SetCheckpointDefaults),
		validate: checkedChange(barchan.ValidateCheckpoint),
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
	r.newObject, r.newList = object[barchan.Checkpoint, barchan.CheckpointList]()
	return r
}

func size(q *resourceapi.Quantity) string {
	if q == nil {
		return ""
	}
	return q.String()
}

func apiKeyKind() *resource {
	r := &resource{
		gv: barchan.GroupVersion, plural: "apikeys", kind: "APIKey",
		namespaced: true, generation: true,
		validate: checked(barchan.ValidateAPIKey),
		fields: selectable(func(k *barchan.APIKey) fields.Set {
			return fields.Set{"spec.sha256": k.Spec.SHA256}
		}),
		columns: []column{
			text("Prefix", func(k *barchan.APIKey) string { return k.Spec.Prefix }),
			text("Description", func(k *barchan.APIKey) string { return k.Spec.Description }),
			text("Expires", func(k *barchan.APIKey) string {
				if k.Spec.ExpiresAt == nil {
					return ""
				}
				return k.Spec.ExpiresAt.UTC().Format(time.RFC3339)
			}),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[barchan.APIKey, barchan.APIKeyList]()
	return r
}

func templateRevisionKind() *resource {
	r := &resource{
		gv: barchan.GroupVersion, plural: "templaterevisions", kind: "TemplateRevision", shortNames: []string{"trev"},
		namespaced: true, generation: true,
		validate: checkedChange(barchan.ValidateTemplateRevision),
		columns: []column{
			text("Template", func(t *barchan.TemplateRevision) string { return t.Spec.TemplateName }),
			number("Number", func(t *barchan.TemplateRevision) int64 { return t.Spec.Number }),
			text("Revision", func(t *barchan.TemplateRevision) string { return t.Spec.Revision }),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[barchan.TemplateRevision, barchan.TemplateRevisionList]()
	return r
}
