// Package sandbox holds the rules of a sandbox's lifecycle, free of I/O: its ID, its phases, its
// access tokens, the supported part of a Pod specification, and what a node reports.
//
// Phases and their transitions (next in phase.go is the same as data):
//
//	Pending → Starting → Running → Pausing → Paused
//	                        ↑          │        │
//	                        │          ↓        │
//	                        ├──────── (fails)   │
//	                        └──── Resuming ←────┘
//	any of them → Stopping → Dead
//
// A phase is derived from the object ([PhaseOf]) and stored nowhere else.
package sandbox
