package cpushare

import (
	"math"
	"time"
)

const (
	// window is the time constant of all averages.
	window = 500 * time.Millisecond
	// contended is the part of the machine's processor time that nothing uses, below which processes wait for each other.
	contended = 0.1
	// A sandbox is lowered if it uses more than enough cores, and excess times the average of the active ones.
	enough, excess = 0.1, 1.25
	// active is the use, in cores, from which on a sandbox counts in that average.
	active = 0.05
	// A lowered sandbox starves that gets less than this part of the average for patience. Then further ones may be lowered.
	starved  = 0.5
	patience = 5 * time.Second
	// A lowered sandbox is raised that uses less than this part of the limit which it had exceeded, for forgiven. Where processors
	// are idle, a tenth of the time is long enough: it could have used them.
	calm     = 1.0 / 3
	forgiven = 10 * time.Second
)

// load is the recent use of one sandbox.
type load struct {
	cores   float64 // an average
	lowered bool
	limit   float64 // that it exceeded when it was lowered, in cores
	// Since then, for how long it has used little, and for how long it may have had too little.
	calm, starves time.Duration
}

// policy decides which sandboxes have the lowest priority.
type policy struct {
	idle  float64 // an average
	loads map[string]*load
}

func newPolicy() *policy { return &policy{idle: 1, loads: map[string]*load{}} }

// busy reports whether the policy needs the use of sandboxes: processors are contended, or some sandbox is lowered.
func (p *policy) busy() bool { return p.idle < contended || p.lowered() > 0 }

// lowered counts the sandboxes with the lowest priority.
func (p *policy) lowered() (n int) {
	for _, l := range p.loads {
		if l.lowered {
			n++
		}
	}
	return n
}

// observe takes the part of processor time that was idle for a time.
func (p *policy) observe(idle float64, took time.Duration) { p.idle += keep(took) * (idle - p.idle) }

// keep is the weight of what was measured for a time in an average.
func keep(took time.Duration) float64 { return 1 - math.Exp(-took.Seconds()/window.Seconds()) }

// decide takes the cores that each sandbox has used for a time, and returns those whose priority changes. It forgets all others.
func (p *policy) decide(used map[string]float64, took time.Duration) (lower, raise []string) {
	for name := range p.loads {
		if _, ok := used[name]; !ok {
			delete(p.loads, name)
		}
	}
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
		if l.starves += took; l.cores >= starved*mean {
			l.starves = 0
		}
	}
	further := p.idle < contended && p.further()
	for name, l := range p.loads {
		switch {
		case l.lowered && p.forgive(l, took):
			l.lowered, raise = false, append(raise, name)
		case !l.lowered && further && l.cores > limit:
			*l, lower = load{cores: l.cores, lowered: true, limit: limit}, append(lower, name)
		}
	}
	return lower, raise
}

// further reports whether more sandboxes may be lowered: none is, or one starves beside the others.
func (p *policy) further() bool {
	for _, l := range p.loads {
		if l.lowered && l.starves >= patience {
			return true
		}
	}
	return p.lowered() == 0
}

// forgive counts the time for which a lowered sandbox has been calm.
func (p *policy) forgive(l *load, took time.Duration) bool {
	switch {
	case l.cores >= calm*l.limit:
		l.calm = 0
	case p.idle >= contended:
		l.calm += 10 * took
	default:
		l.calm += took
	}
	return l.calm >= forgiven
}
