package v1alpha1

import (
	"cmp"
	"slices"
)

// KeyScope is what the holder of an API key may do in its namespace. Each one includes those before it. The zero value is
// ScopeAdmin: keys from before there were scopes keep their rights.
type KeyScope string

// The scopes.
const (
	// ScopeUse creates, reaches and ends sandboxes, with their files, snapshots and forks.
	ScopeUse KeyScope = "use"
	// ScopeManage also changes templates, volumes, webhooks and keys of ScopeUse.
	ScopeManage KeyScope = "manage"
	// ScopeAdmin may do everything in the namespace.
	ScopeAdmin KeyScope = "admin"
)

// KeyScopes lists the scopes, the least first.
func KeyScopes() []KeyScope { return []KeyScope{ScopeUse, ScopeManage, ScopeAdmin} }

// OrAdmin returns the scope, and ScopeAdmin for the zero value.
func (s KeyScope) OrAdmin() KeyScope { return cmp.Or(s, ScopeAdmin) }

// Known reports whether s is one of KeyScopes.
func (s KeyScope) Known() bool { return slices.Contains(KeyScopes(), s) }

// Covers reports whether a key of scope s may do what needs the other one. An unknown scope covers nothing.
func (s KeyScope) Covers(other KeyScope) bool {
	have, need := slices.Index(KeyScopes(), s.OrAdmin()), slices.Index(KeyScopes(), other.OrAdmin())
	return have >= need && need >= 0
}

// Hands reports whether a key of scope s may make, change and delete keys of the other one.
func (s KeyScope) Hands(other KeyScope) bool {
	return s.OrAdmin() == ScopeAdmin || s == ScopeManage && other == ScopeUse
}
