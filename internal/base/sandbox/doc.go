// Package sandbox holds the rules of a sandbox's life, free of I/O: its ID, its phases, its
// access tokens, what of a Pod specification one machine can honour, and what a node reports.
//
// Phases and the ways between them (next in phase.go is the same as data):
//
//	Pending → Starting → Running → Pausing → Paused
//	                        ↑          │        │
//	                        │          ↓        │
//	                        ├──────── (fails)   │
//	                        └──── Resuming ←────┘
//	any of them → Stopping → Dead
//
// A phase is derived from the object ([PhaseOf]); nobody stores a second truth.
package sandbox
