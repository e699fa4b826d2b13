package cpushare

import (
	"maps"
	"math"
	"time"
)

const (
	// window is the time constant of all averages.
	window = 500 * time.Millisecond
	// contended is the part of the machine's processor time that nothing uses, below which processes wait for each other.
	contended = 0.1
	// One is lowered if it uses more than enough cores, and excess times the average of the active ones, for insist.
	enough, excess = 0.5, 1.25
	insist         = 600 * time.Millisecond
	// active is the use, in cores, from which on one counts in that average.
	active = 0.05
	// A lowered one starves that gets less than this part of the average. After a while further ones may be lowered, which then share
	// equally; after a longer one it is raised.
	starved             = 0.65
	sharesAfter, endure = time.Second, 3 * time.Second
	// A lowered one is raised that uses less than this part of the limit which it had exceeded, for forgiveAfter. Where processors
	// are idle, a tenth of the time is long enough: it could have used them.
	calm         = 1.0 / 3
	forgiveAfter = 10 * time.Second
	// Lowered ones that together use less than this part of the processors that they are kept to, or beside which nothing is
	// active, have all processors again after a while.
	unconfined   = 0.5
	releaseAfter = 2 * time.Second
)

// load is the recent use of one sandbox, or of one namespace's sandboxes.
type load struct {
	cores   float64 // an average
	lowered bool
	limit   float64 // that it exceeded when it was lowered, in cores
	// Since then, for how long it has used little, and for how long it may have had too little.
	calm, starves time.Duration
	// Before, for how long it has exceeded its limit.
	exceeds time.Duration
}

// policy decides which of those that compete have the lowest priority: sandboxes, or namespaces.
type policy struct {
	loads map[string]*load
}

func newPolicy() *policy { return &policy{loads: map[string]*load{}} }

// lowered reports whether one has the lowest priority.
func (p *policy) lowered(name string) bool {
	l := p.loads[name]
	return l != nil && l.lowered
}

// anyLowered reports whether any has.
func (p *policy) anyLowered() bool {
	for _, l := range p.loads {
		if l.lowered {
			return true
		}
	}
	return false
}

// keep is the weight of what was measured for a time in an average.
func keep(took time.Duration) float64 { return 1 - math.Exp(-took.Seconds()/window.Seconds()) }

// decide takes the cores that each has used for a time, and the recent part of all processor time that was idle. It forgets all others.
func (p *policy) decide(used map[string]float64, idle float64, took time.Duration) {
	maps.DeleteFunc(p.loads, func(name string, _ *load) bool { _, ok := used[name]; return !ok })
	sum, n := 0.0, 0.0
	for name, cores := range used {
		l := p.loads[name]
		if l == nil {
			l = &load{}
			p.loads[name] = l
		}
		if l.cores += keep(took) * (cores - l.cores); l.cores > active {
			sum, n = sum+l.cores, n+1
		}
	}
	mean := sum / max(n, 1)
	limit := max(enough, excess*mean)
	for _, l := range p.loads {
		count(&l.starves, l.lowered && l.cores < starved*mean, took)
		count(&l.exceeds, !l.lowered && idle < contended && l.cores > limit, took)
	}
	further := p.further()
	for _, l := range p.loads {
		switch {
		case l.lowered:
			l.lowered = !l.forgiven(idle, took) && l.starves < endure
		case further && l.exceeds >= insist:
			*l = load{cores: l.cores, lowered: true, limit: limit}
		}
	}
}

// count adds to the time for which something has been so.
func count(time *time.Duration, so bool, took time.Duration) {
	if *time += took; !so {
		*time = 0
	}
}

// further reports whether more may be lowered: none is, or one starves beside the others.
func (p *policy) further() bool {
	for _, l := range p.loads {
		if l.starves >= sharesAfter {
			return true
		}
	}
	return !p.anyLowered()
}

// forgiven counts the time for which a lowered one has been calm, and reports whether it was long enough.
func (l *load) forgiven(idle float64, took time.Duration) bool {
	switch {
	case l.cores >= calm*l.limit:
		l.calm = 0
	case idle >= contended:
		l.calm += 10 * took
	default:
		l.calm += took
	}
	return l.calm >= forgiveAfter
}

// confinement decides whether lowered sandboxes are kept to a part of the processors. The kernel takes a processor from them at once,
// but not while they are within a system call or an interrupt.
type confinement struct {
	cores  float64 // of the processors that they are kept to; 0: there is no other
	on     bool
	unused time.Duration
}

// decide takes the cores that lowered sandboxes use, and that the others do.
func (c *confinement) decide(lowered, others float64, took time.Duration) {
	if !c.on {
		c.on, c.unused = c.cores > 0 && lowered > c.cores && others > active, 0
		return
	}
	count(&c.unused, lowered < unconfined*c.cores || others <= active, took)
	c.on = c.unused < releaseAfter
}
