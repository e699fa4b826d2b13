// Package rulewatch tells when objects of nftables tables are deleted, by any program: nft flush ruleset beneath a running
// server opens what the rules had closed. It reads the kernel's notifications and changes nothing.
package rulewatch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// nameAttribute is the name of the table in messages about tables, chains, rules and sets: NFTA_TABLE_NAME and its like in
// linux/netfilter/nf_tables.h.
const nameAttribute = 1

// deletions are the messages that tell of one, by their type.
var deletions = []byte{unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELSET}

// Run calls deleted after each deletion from a table with one of the names, and after a loss of notifications, until ctx is
// done or the kernel refuses.
func Run(ctx context.Context, tables []string, deleted func()) error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
	if err != nil {
		return fmt.Errorf("listen for changes of nftables: %w", err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		messages, err := conn.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			deleted()
		case err != nil:
			return fmt.Errorf("listen for changes of nftables: %w", err)
		case slices.ContainsFunc(messages, func(m netlink.Message) bool { return isDeletion(m, tables) }):
			deleted()
		}
	}
}

// isDeletion reports whether a message tells of a deletion from one of the tables.
func isDeletion(m netlink.Message, tables []string) bool {
	const header = 4 // struct nfgenmsg
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || !slices.Contains(deletions, byte(m.Header.Type)) || len(m.Data) < header {
		return false
	}
	attributes, err := netlink.NewAttributeDecoder(m.Data[header:])
	if err != nil {
		return true // better once too often
	}
	for attributes.Next() {
		if attributes.Type() == nameAttribute {
			return slices.Contains(tables, attributes.String())
		}
	}
	return false
}

// Count counts the rules of the chains at hooks, by table and chain.
func Count(tables []*nftables.Table) (map[string]int, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	found := map[string]int{}
	for _, table := range tables {
		chains, err := conn.ListChainsOfTableFamily(table.Family)
		if err != nil {
			return nil, fmt.Errorf("list chains: %w", err)
		}
		for _, c := range chains {
			if c.Table.Name != table.Name || c.Hooknum == nil {
				continue
			}
			rules, err := conn.GetRules(table, c)
			if err != nil {
				return nil, fmt.Errorf("read chain %s: %w", c.Name, err)
			}
			found[fmt.Sprint(table.Family, table.Name, c.Name)] = len(rules)
		}
	}
	return found, nil
}
