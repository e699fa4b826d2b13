package firewall

import (
	"github.com/google/nftables"

	"github.com/barchan-dev/barchan/internal/node/netdev/rulewatch"
)

// Tables are the names of the instance's tables.
func (r *Rules) Tables() []string { return []string{r.cfg.Table, r.egress.table.Name} }

// Intact reports whether the kernel has as many rules for all sandboxes as Install has written. It does not look at the
// policies of single ones.
func (r *Rules) Intact() (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	found, err := r.count()
	for chain, rules := range r.installed {
		if found[chain] < rules {
			return false, err
		}
	}
	return err == nil, err
}

func (r *Rules) count() (map[string]int, error) {
	return rulewatch.Count([]*nftables.Table{r.bridge, r.inet, r.egress.table})
}
