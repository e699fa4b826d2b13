// Package timeline tells a sandbox's life from its object, with what a watch and Events have shown of it.
package timeline

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// Sources of moments: what the time of each is worth.
const (
	FromObject    = "object"    // written with the change, to the nanosecond
	FromWatch     = "watch"     // when this server's watch showed it, to the millisecond
	FromEvents    = "event"     // recorded by a controller
	FromCondition = "condition" // to the second
	FromNode      = "node"      // measured by the node, to the millisecond
)

// Moment is one point of a sandbox's timeline.
type Moment struct {
	At     time.Time `json:"at"`
	What   string    `json:"what"`
	Detail string    `json:"detail,omitempty"`
	Source string    `json:"source"`
	Bad    bool      `json:"bad,omitempty"`
	// Took is the milliseconds of an operation of the node, and Steps are its parts.
	Took  int64               `json:"took,omitempty"`
	Steps []agents.StepStatus `json:"steps,omitempty"`
}

// Of puts together what is known of a sandbox's life, in order: by its object, and what a watch and Events have shown. Conditions tell
// only what came before since, the start of the watch.
func Of(o *agents.Sandbox, since time.Time, shown []Moment) []Moment {
	precise := barchan.ExactTime(o, barchan.AnnotationCreatedAt)
	claimed := barchan.ExactTime(o, pool.AnnotationClaimedAt)
	cold := o.Labels[agents.LabelLaunchType] == agents.LaunchCold && !claimed.IsZero()
	all := []Moment{{At: barchan.CreatedAt(o), What: "Created", Source: FromObject}}
	switch {
	case cold: // noted by the create itself
		precise, all[0].At, all[0].Detail = claimed, claimed, coldText(o)
	case precise.IsZero():
		all[0].Source = FromCondition
	}
	if b := o.Spec.Barchan; b != nil && b.Restore != nil {
		all[0].Detail = "from snapshot " + b.Restore.CheckpointName
	}
	all = append(all, shown...)
	if !cold && !claimed.IsZero() {
		all = append(all, Moment{At: claimed, What: "Claimed", Detail: claimText(o, claimed), Source: FromObject})
	}
	all = append(all, operations(o)...)
	all = append(all, conditions(o, since)...)
	slices.SortStableFunc(all, func(a, b Moment) int { return a.At.Compare(b.At) })
	if precise.IsZero() { // the object's second is never later than what followed it
		for i := range all {
			if all[i].What == "Created" && len(all) > 1 && i != 0 {
				all[0], all[i] = all[i], all[0]
			}
		}
	}
	return all
}

func claimText(o *agents.Sandbox, at time.Time) string {
	waits := pool.WaitsOf(o)
	text := "warm: the pool had it ready"
	if rest := at.Sub(o.CreationTimestamp.Time); waits.Member > 0 {
		text = "warm: the pool had none ready, and the claim waited " + waits.Member.String() + " until this one was"
	} else if rest > time.Second {
		text += ", made " + rest.Round(time.Second).String() + " before"
	}
	return text + quotaText(waits)
}

// coldText is why a claim started a sandbox.
func coldText(o *agents.Sandbox) string {
	waits := pool.WaitsOf(o)
	text := "cold start: the template has no pool here"
	switch {
	case waits.Member > 0:
		text = "cold start: the claim waited " + waits.Member.String() + " in vain for a sandbox of the pool"
	case pool.OriginOf(o) != "":
		text = "cold start: the pool had no sandbox that was ready, or soon to be, and fits the claim"
	case o.Spec.Barchan != nil && o.Spec.Barchan.Restore != nil:
		text = "cold start"
	}
	return text + quotaText(waits)
}

func quotaText(w pool.Waits) string {
	if w.Quota == 0 {
		return ""
	}
	return "; it was in the queue of the namespace's quota for " + w.Quota.String()
}

// operations are what the node did, with its steps.
func operations(o *agents.Sandbox) (all []Moment) {
	for _, op := range did(o) {
		all = append(all, Moment{At: op.StartedAt.UTC(), What: "Node: " + strings.ToLower(string(op.Operation)), Source: FromNode, Took: op.Milliseconds, Steps: op.Steps})
	}
	return all
}

func did(o *agents.Sandbox) []agents.OperationStatus {
	if o.Status.Barchan == nil {
		return nil
	}
	return o.Status.Barchan.Operations
}

// Events are what controllers recorded of an object.
func Events(list []corev1.Event) (all []Moment) {
	for i := range list {
		e := &list[i]
		at := e.EventTime.Time
		if at.IsZero() {
			at = e.CreationTimestamp.Time
		}
		all = append(all, Moment{At: at.UTC(), What: e.Reason, Detail: e.Message, Source: FromEvents, Bad: e.Type == corev1.EventTypeWarning})
	}
	return all
}

// conditions are changes that came before the watch. Of one in the second in which an operation ended, that is the time.
func conditions(o *agents.Sandbox, since time.Time) (all []Moment) {
	for i := range o.Status.Conditions {
		c := &o.Status.Conditions[i]
		if c.Type == agents.ConditionPodScheduled || c.Status != metav1.ConditionTrue || c.LastTransitionTime.After(since) {
			continue
		}
		at := c.LastTransitionTime.UTC()
		for _, op := range did(o) {
			if end := endOf(&op); end.Truncate(time.Second).Equal(at.Truncate(time.Second)) {
				at = end
			}
		}
		m := Moment{At: at, What: c.Type, Detail: c.Message, Source: FromCondition}
		if c.Type == agents.ConditionSuspended { // its message is of where the memory is now
			m.Detail = ""
		}
		all = append(all, m)
	}
	return all
}
