// Package firewall installs the nftables rules of one instance's sandboxes: which addresses a port
// may send from, where all sandboxes may send, and the egress policy of each sandbox. It creates
// no links and chooses no addresses. It decides no policy: package egress compiles them, and the
// kernel must agree with its Decide.
//
// Lock order: [Rules].mu (one transaction), then egressTable.mu (what is known of the kernel).
package firewall
