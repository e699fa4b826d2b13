// Package nftset reads nftables sets and adds them to transactions. It knows no set by name.
//
// numbering is a leaf of the lock order.
package nftset

import (
	"fmt"
	"slices"
	"sync"

	"github.com/google/nftables"
)

// Elements reads a set; one that does not exist has none.
func Elements(conn *nftables.Conn, set *nftables.Set) ([]nftables.SetElement, error) {
	sets, err := List(conn, set.Table)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(sets, func(s *nftables.Set) bool { return s.Name == set.Name }) {
		return nil, nil
	}
	elements, err := conn.GetSetElements(set)
	if err != nil {
		return nil, fmt.Errorf("read set %s: %w", set.Name, err)
	}
	return elements, nil
}

// List returns a table's sets. The table is looked for first, because the library does not tell
// the cause when one is missing.
func List(conn *nftables.Conn, table *nftables.Table) ([]*nftables.Set, error) {
	tables, err := conn.ListTablesOfFamily(table.Family)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == table.Name }) {
		return nil, nil
	}
	sets, err := conn.GetSets(table)
	if err != nil {
		return nil, fmt.Errorf("list sets of %s: %w", table.Name, err)
	}
	return sets, nil
}

// MaxElements is how many elements fit into one message with room to spare.
const MaxElements = 500

// Add adds a set with any number of elements.
func Add(conn *nftables.Conn, set *nftables.Set, elements []nftables.SetElement) error {
	if err := AddEmpty(conn, set); err != nil {
		return err
	}
	for part := range slices.Chunk(elements, MaxElements) {
		if err := conn.SetAddElements(set, part); err != nil {
			return fmt.Errorf("fill set %s: %w", set.Name, err)
		}
	}
	return nil
}

// numbering is held while a set gets its number: the library counts them in one variable for all
// connections of the process, and does not guard it.
var numbering sync.Mutex

// AddEmpty adds a set without elements, and numbers it.
func AddEmpty(conn *nftables.Conn, set *nftables.Set) error {
	numbering.Lock()
	defer numbering.Unlock()
	if err := conn.AddSet(set, nil); err != nil {
		return fmt.Errorf("add set %s: %w", set.Name, err)
	}
	return nil
}
