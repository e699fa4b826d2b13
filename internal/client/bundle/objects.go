package bundle

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

const (
	// maxObjects bounds the objects of one kind, pageSize those of one request.
	maxObjects = 5000
	pageSize   = 500
	// maxScalar bounds a text of an object, in bytes.
	maxScalar = 256
)

// kind is a kind of objects, with the fields that a bundle has of it: paths of scalars, where [] stands for each item of a list.
type kind struct {
	resource schema.GroupVersionResource
	fields   []string
}

// Fields that several kinds have.
var (
	metadataFields = []string{
		"metadata.name", "metadata.namespace", "metadata.uid", "metadata.generation", "metadata.creationTimestamp", "metadata.deletionTimestamp",
		"metadata.finalizers[]", "metadata.ownerReferences[].kind", "metadata.ownerReferences[].name",
	}
	conditionFields = []string{
		"status.conditions[].type", "status.conditions[].status", "status.conditions[].reason", "status.conditions[].lastTransitionTime", "status.conditions[].observedGeneration",
	}
	blueprintFields = []string{
		"spec.podTemplate.spec.runtimeClassName", "spec.podTemplate.spec.restartPolicy", "spec.podTemplate.spec.containers[].image",
		"spec.podTemplate.spec.containers[].resources.limits.cpu", "spec.podTemplate.spec.containers[].resources.limits.memory",
		"spec.podTemplate.spec.containers[].resources.limits.ephemeral-storage", "spec.podTemplate.spec.containers[].resources.requests.cpu",
		"spec.podTemplate.spec.containers[].resources.requests.memory", "spec.podTemplate.spec.initContainers[].image",
	}
)

// policyFields are the allowed fields of a BarchanSpec at a path.
func policyFields(at string) (out []string) {
	for _, f := range []string{
		"onTimeout", "suspend", "resume", "restore.checkpointName", "restore.filesOnly", "warmUp.timeoutSeconds", "fork.secrets",
		"wake.onTraffic", "wake.timeoutSeconds", "idle.afterSeconds", "idle.action", "access.openAgent", "access.publicTraffic", "access.requestsPerSecond", "network.internet",
	} {
		out = append(out, at+"."+f)
	}
	return out
}

// kinds are the kinds of a bundle. The list of nodes is there on a cluster only.
func kinds() []kind {
	of := func(gv schema.GroupVersion, plural string, fields ...[]string) kind {
		return kind{gv.WithResource(plural), slices.Concat(append([][]string{metadataFields, conditionFields}, fields...)...)}
	}
	return []kind{
		of(agents.GroupVersion, "sandboxes", blueprintFields, policyFields("spec.barchan"), []string{
			"spec.shutdownTime", "spec.shutdownPolicy", "spec.operatingMode", "status.nodeName", "status.podIPs[]",
			"status.barchan.id", "status.barchan.phase", "status.barchan.memory", "status.barchan.startedAt", "status.barchan.runtime", "status.barchan.image", "status.barchan.exitCode",
			"status.barchan.operations[].operation", "status.barchan.operations[].startedAt", "status.barchan.operations[].milliseconds",
			"status.barchan.operations[].steps[].name", "status.barchan.operations[].steps[].after", "status.barchan.operations[].steps[].milliseconds",
			"status.barchan.containers[].name", "status.barchan.containers[].ready", "status.barchan.containers[].restartCount",
			"status.barchan.containers[].state.running.startedAt", "status.barchan.containers[].state.waiting.reason",
			"status.barchan.containers[].state.terminated.reason", "status.barchan.containers[].state.terminated.exitCode",
		}),
		of(extensions.GroupVersion, "sandboxtemplates", blueprintFields, policyFields("spec.barchan.sandbox"), []string{
			"spec.networkPolicyManagement", "spec.envVarsInjectionPolicy", "spec.volumeClaimTemplatesPolicy", "spec.barchan.public", "spec.barchan.aliases[]",
		}),
		of(extensions.GroupVersion, "sandboxwarmpools", []string{
			"spec.replicas", "spec.sandboxTemplateRef.name", "spec.updateStrategy.type", "spec.barchan.templateNamespace", "spec.barchan.maxSurge", "spec.barchan.maxUnavailable",
			"spec.barchan.autoscale.minReplicas", "spec.barchan.autoscale.maxReplicas", "spec.barchan.autoscale.sparePercent", "spec.barchan.autoscale.idleSeconds",
			"status.replicas", "status.readyReplicas", "status.observedGeneration", "status.currentRevision", "status.barchan.desiredReplicas", "status.barchan.currentReplicas",
			"status.barchan.currentReadyReplicas", "status.barchan.claimedReplicas", "status.barchan.lastClaimTime",
		}),
		of(extensions.GroupVersion, "sandboxclaims", []string{
			"spec.warmPoolRef.name", "spec.lifecycle.shutdownTime", "spec.lifecycle.ttlSecondsAfterFinished", "spec.lifecycle.shutdownPolicy", "status.sandbox.name", "status.sandbox.podIPs[]",
		}),
		of(barchan.GroupVersion, "checkpoints", []string{
			"spec.sandboxName", "spec.origin", "spec.keepRunning", "spec.content", "spec.ttlSeconds", "status.phase", "status.snapshotID", "status.content", "status.size", "status.memorySize",
			"status.runtime", "status.runtimeBuild", "status.image", "status.completedAt", "status.source.id", "status.source.node", "status.source.templateName", "status.source.templateNamespace",
		}),
		of(barchan.GroupVersion, "templatebuilds", []string{
			"spec.templateName", "spec.cpu", "spec.memory", "status.phase", "status.step", "status.cachedSteps", "status.templateID", "status.checkpointName", "status.startedAt", "status.completedAt",
		}),
		of(barchan.GroupVersion, "templaterevisions", []string{"spec.templateName", "spec.revision", "spec.number"}),
		of(barchan.GroupVersion, "volumes", []string{
			"spec.capacity", "spec.storageClassName", "spec.readOnly", "status.phase", "status.volumeID", "status.capacity", "status.used", "status.files", "status.sandboxes",
		}),
		of(corev1.SchemeGroupVersion, "namespaces", []string{"status.phase"}),
		of(corev1.SchemeGroupVersion, "nodes", []string{
			"spec.unschedulable", "status.nodeInfo.kernelVersion", "status.nodeInfo.osImage", "status.nodeInfo.containerRuntimeVersion", "status.nodeInfo.kubeletVersion",
			"status.nodeInfo.architecture", "status.allocatable.cpu", "status.allocatable.memory", "status.allocatable.pods", "status.allocatable.ephemeral-storage",
		}),
		of(corev1.SchemeGroupVersion, "events", []string{
			"type", "reason", "count", "firstTimestamp", "lastTimestamp", "eventTime", "reportingComponent", "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
		}),
	}
}

// list reads the objects of a kind, with their allowed fields alone.
func (k kind) list(ctx context.Context, client dynamic.Interface) (content any, note string, err error) {
	out := []any{}
	opts := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := client.Resource(k.resource).List(ctx, opts)
		if apierrors.IsNotFound(err) {
			return nil, "the server does not have this kind", nil
		}
		if err != nil {
			return out, "", fmt.Errorf("list %s: %w", k.resource.Resource, err)
		}
		out = append(out, k.pick(page)...)
		if opts.Continue = page.GetContinue(); opts.Continue == "" {
			return out, "", nil
		}
		if len(out) >= maxObjects {
			return out, fmt.Sprintf("the first %d alone", len(out)), nil
		}
	}
}

func (k kind) pick(page *unstructured.UnstructuredList) (out []any) {
	for i := range page.Items {
		picked := map[string]any{}
		for _, f := range k.fields {
			pick(picked, page.Items[i].Object, strings.Split(f, "."))
		}
		out = append(out, picked)
	}
	return out
}

// pick copies the scalar at a path from one object to another. Maps and lists at the end of a path are not copied.
func pick(to, from map[string]any, path []string) {
	name, isList := strings.CutSuffix(path[0], "[]")
	value, ok := from[name]
	switch {
	case !ok:
	case isList:
		items, _ := value.([]any)
		into, _ := to[name].([]any)
		if into == nil {
			into = make([]any, len(items))
		}
		for i := range items {
			into[i] = pickItem(into[i], items[i], path[1:])
		}
		to[name] = into
	case len(path) == 1:
		if s, ok := scalar(value); ok {
			to[name] = s
		}
	default:
		to[name] = pickItem(to[name], value, path[1:])
	}
}

// pickItem picks from an item of a list or from a field, into the fields of it that are there already.
func pickItem(into, from any, path []string) any {
	if len(path) == 0 {
		if s, ok := scalar(from); ok {
			return s
		}
		return into
	}
	picked, _ := into.(map[string]any)
	if picked == nil {
		picked = map[string]any{}
	}
	if fields, ok := from.(map[string]any); ok {
		pick(picked, fields, path)
	}
	return picked
}

func scalar(v any) (any, bool) {
	switch v := v.(type) {
	case string:
		return v[:min(len(v), maxScalar)], true
	case bool, int64, float64:
		return v, true
	}
	return nil, false
}
