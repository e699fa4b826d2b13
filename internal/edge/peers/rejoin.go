package peers

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	firstRejoin   = 500 * time.Millisecond
	longestRejoin = 15 * time.Second
	lookupTimeout = 5 * time.Second
	joinsAtOnce   = 8
	maxKnown      = maxMembers
	// forgetAfter is how long this replica tries to reach an absent member.
	forgetAfter = 24 * time.Hour
	seenEvery   = time.Hour
)

// savedMember is a member in the state file.
type savedMember struct {
	Address netip.AddrPort `json:"address"`
	Seen    time.Time      `json:"seen"`
}

type stateFile struct {
	Members map[string]savedMember `json:"members"`
}

// rejoin contacts absent seeds and earlier members until ctx is done. It never stops: after a network
// partition, each half looks complete from inside.
func (r *Replica) rejoin(ctx context.Context, list *memberlist.Memberlist) {
	wait := r.cfg.rejoinMin
	for {
		missing := r.missing(ctx)
		r.join(ctx, list, missing)
		if len(missing) == 0 {
			wait = r.cfg.rejoinMax
		}
		timer := time.NewTimer(jitter(wait))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-r.away: // a member left: it may be back soon
			timer.Stop()
			wait = r.cfg.rejoinMin
			_ = pause(ctx, wait, wait)
		case <-timer.C:
			wait = min(2*wait, r.cfg.rejoinMax)
		}
	}
}

func (r *Replica) join(ctx context.Context, list *memberlist.Memberlist, addrs []netip.AddrPort) {
	var wg sync.WaitGroup
	defer wg.Wait()
	turns := make(chan struct{}, joinsAtOnce)
	for _, addr := range addrs {
		select {
		case turns <- struct{}{}:
		case <-ctx.Done():
			return
		}
		wg.Go(func() {
			defer func() { <-turns }()
			result := resultOK
			if _, err := list.Join([]string{addr.String()}); err != nil {
				result = resultFailed
				r.log.DebugContext(ctx, "cannot join, retrying", telemetry.Address, addr, telemetry.Error, err)
			}
			r.metrics.joins.WithLabelValues(result).Inc()
		})
	}
}

// missing returns the addresses of seeds and saved members without a current member.
func (r *Replica) missing(ctx context.Context) []netip.AddrPort {
	here := map[netip.AddrPort]bool{r.self.Gossip: true}
	var gone []netip.AddrPort
	r.mu.Lock()
	for _, m := range r.members {
		here[m.Gossip] = true
	}
	for name, k := range r.known {
		if _, ok := r.members[name]; !ok {
			gone = append(gone, k.Address)
		}
	}
	r.mu.Unlock()
	for _, seed := range r.cfg.Seeds {
		found, err := r.resolve(ctx, seed)
		if err != nil {
			r.log.DebugContext(ctx, "seed cannot be resolved, retrying", telemetry.Address, seed, telemetry.Error, err)
			r.metrics.joins.WithLabelValues(resultFailed).Inc()
		}
		gone = append(gone, found...)
	}
	slices.SortFunc(gone, netip.AddrPort.Compare)
	return slices.DeleteFunc(slices.Compact(gone), func(a netip.AddrPort) bool { return here[a] })
}

// resolve queries the DNS each time.
func (r *Replica) resolve(ctx context.Context, seed string) ([]netip.AddrPort, error) {
	host, port, err := splitSeed(seed)
	if err != nil {
		return nil, err
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(addr.Unmap(), port)}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addrs, err := r.cfg.lookup(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", host, err)
	}
	var found []netip.AddrPort
	for _, addr := range addrs {
		found = append(found, netip.AddrPortFrom(addr.Unmap(), port))
	}
	return found, nil
}

func splitSeed(seed string) (host string, port uint16, err error) {
	host, text, err := net.SplitHostPort(seed)
	if err != nil {
		return "", 0, fmt.Errorf("seed %q: want host:port: %w", seed, err)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || host == "" {
		return "", 0, fmt.Errorf("seed %q: want host:port: %w", seed, cmp.Or(err, strconv.ErrRange))
	}
	return host, uint16(n), nil
}

// persistMembers writes the members to the state file after each change until ctx is done, and once
// more then.
func (r *Replica) persistMembers(ctx context.Context) {
	tick := time.NewTicker(seenEvery)
	defer tick.Stop()
	for done := false; ; {
		if err := r.save(); err != nil {
			r.log.WarnContext(ctx, "members cannot be written down", telemetry.Path, r.cfg.StateFile, telemetry.Error, err)
		}
		if done {
			return
		}
		select {
		case <-ctx.Done():
			done = true
		case <-r.learnt:
		case <-tick.C:
		}
	}
}

func (r *Replica) save() error {
	if r.cfg.StateFile == "" {
		return nil
	}
	r.mu.Lock()
	r.pruneLocked(time.Now())
	text, err := json.Marshal(stateFile{Members: r.known})
	r.mu.Unlock()
	if err != nil {
		return fmt.Errorf("encode members: %w", err)
	}
	return durable.WriteFile(r.cfg.StateFile, append(text, '\n'), keyMode)
}

// pruneLocked records the current members and removes those absent for too long.
//
// +checklocks:r.mu
func (r *Replica) pruneLocked(now time.Time) {
	for name, m := range r.members {
		r.known[name] = savedMember{m.Gossip, now}
	}
	for name, k := range r.known {
		if now.Sub(k.Seen) > forgetAfter {
			delete(r.known, name)
		}
	}
	for len(r.known) > maxKnown {
		var oldest string
		for name, k := range r.known {
			if oldest == "" || k.Seen.Before(r.known[oldest].Seen) {
				oldest = name
			}
		}
		delete(r.known, oldest)
	}
}

// loadMembers reads the state file. An unreadable one is set aside: the seeds suffice.
func (r *Replica) loadMembers() map[string]savedMember {
	none := map[string]savedMember{}
	if r.cfg.StateFile == "" {
		return none
	}
	text, err := os.ReadFile(r.cfg.StateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return none
	}
	var f stateFile
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err != nil {
		aside := r.cfg.StateFile + ".bad"
		r.log.Warn("last known members cannot be read, set aside", telemetry.Path, aside, telemetry.Error, errors.Join(err, os.Rename(r.cfg.StateFile, aside)))
		return none
	}
	for name, k := range f.Members {
		if !k.Address.IsValid() || k.Address.Port() == 0 || name == r.cfg.Name {
			delete(f.Members, name)
		}
	}
	if f.Members == nil {
		return none
	}
	return f.Members
}
