package quota

import (
	"fmt"
	"math"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// AnnotationPrefix begins the annotations on a Namespace that override limits.
const AnnotationPrefix = "barchan.dev/quota-"

// Annotations on a Namespace, each of which overrides one field of [Limits].
const (
	// AnnotationSandboxes is a whole number; 0 refuses every sandbox.
	AnnotationSandboxes = AnnotationPrefix + "sandboxes"
	// AnnotationCPU and AnnotationMemory are quantities: "2.5" cores or "500m", "16Gi".
	AnnotationCPU    = AnnotationPrefix + "cpu"
	AnnotationMemory = AnnotationPrefix + "memory"
	// AnnotationCounts is "running" or "all".
	AnnotationCounts = AnnotationPrefix + "counts"
	// AnnotationVolumes is a whole number; 0 refuses every volume. AnnotationVolumeCapacity is a quantity, "100Gi".
	AnnotationVolumes        = AnnotationPrefix + "volumes"
	AnnotationVolumeCapacity = AnnotationPrefix + "volume-capacity"
	// AnnotationCreates is a whole number, the new sandboxes a second. AnnotationStored is a quantity, "100Gi".
	AnnotationCreates = AnnotationPrefix + "creates"
	AnnotationStored  = AnnotationPrefix + "stored"
	// AnnotationContents is a quantity, "256Mi"; 0 refuses every object.
	AnnotationContents = AnnotationPrefix + "contents"
)

// Values of AnnotationCounts.
const (
	CountRunning = "running"
	CountAll     = "all"
)

// Limit is an inclusive upper bound. The zero value is unlimited.
type Limit struct {
	Most int64
	Set  bool
}

// AtMost returns a limit of n, which may be 0.
func AtMost(n int64) Limit { return Limit{Most: n, Set: true} }

// Limits are the quotas of a namespace. The zero value is unlimited.
type Limits struct {
	Sandboxes Limit
	MilliCPU  Limit // thousandths of a core
	Memory    Limit // bytes
	// Volumes and VolumeCapacity (bytes) bound the volumes of a namespace, and the sum of their capacities.
	Volumes, VolumeCapacity Limit
	// Creates are new sandboxes a second, forks included, with bursts of [Burst] seconds' worth. 0 refuses all.
	Creates Limit
	// Stored is the sum of the sizes of a namespace's snapshots and of the memory of its paused sandboxes on disk, in bytes.
	Stored Limit
	// Contents is the sum of the sizes of all objects, in bytes.
	Contents Limit
	// Objects bound the numbers of objects by [Kind].
	Objects [kinds]Limit
	// CountPaused counts paused sandboxes like running ones.
	CountPaused bool
}

func (l *Limits) none() bool {
	return !l.Sandboxes.Set && !l.MilliCPU.Set && !l.Memory.Set && !l.Creates.Set
}

// of returns the limits of a namespace and the errors of its annotations. An invalid value falls
// back to the default, or to 0 without one, so that a typing error cannot lift a quota.
func of(ns *corev1.Namespace, defaults Limits) (limits Limits, faults []error) {
	limits = defaults
	set := func(name string, into *Limit, parse func(string) (int64, error)) {
		text, given := ns.Annotations[name]
		if !given {
			return
		}
		n, err := parse(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("namespace %s: annotation %s: %q %w: %w", ns.Name, name, text, err, errs.ErrInvalid))
			if !into.Set {
				*into = AtMost(0)
			}
			return
		}
		*into = AtMost(n)
	}
	size := func(s string) (int64, error) { return parseQuantity(s, (*resource.Quantity).Value) }
	set(AnnotationSandboxes, &limits.Sandboxes, parseCount)
	set(AnnotationCPU, &limits.MilliCPU, func(s string) (int64, error) { return parseQuantity(s, (*resource.Quantity).MilliValue) })
	set(AnnotationMemory, &limits.Memory, size)
	set(AnnotationVolumes, &limits.Volumes, parseCount)
	set(AnnotationVolumeCapacity, &limits.VolumeCapacity, size)
	set(AnnotationCreates, &limits.Creates, parseCount)
	set(AnnotationStored, &limits.Stored, size)
	set(AnnotationContents, &limits.Contents, size)
	for _, kind := range Kinds() {
		set(kind.Annotation(), &limits.Objects[kind], parseCount)
	}
	switch text, given := ns.Annotations[AnnotationCounts]; {
	case !given:
	case text == CountRunning || text == CountAll:
		limits.CountPaused = text == CountAll
	default:
		limits.CountPaused = true
		faults = append(faults, fmt.Errorf("namespace %s: annotation %s: %q is none of %s and %s: %w",
			ns.Name, AnnotationCounts, text, CountRunning, CountAll, errs.ErrInvalid))
	}
	return limits, faults
}

func parseCount(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, errNumber
	}
	return n, nil
}

func parseQuantity(text string, value func(*resource.Quantity) int64) (int64, error) {
	q, err := resource.ParseQuantity(text)
	if err != nil || q.Sign() < 0 || q.CmpInt64(math.MaxInt64/milli) > 0 {
		return 0, errQuantity
	}
	return value(&q), nil
}

const milli = 1000

var (
	errNumber   = fmt.Errorf("is not a whole number of 0 or more")
	errQuantity = fmt.Errorf("is not a quantity of 0 or more")
)
