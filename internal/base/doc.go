// Package base describes the plane that all others depend on: rules and tools without a process of
// their own. It holds no code itself.
//
// Rules of the objects, free of I/O, so that every plane decides alike:
//
//	sandbox     ID, phases, tokens and names of a sandbox
//	pool        revisions of templates; what makes a sandbox a member of a pool
//	podsource   what a Pod takes from Secrets, ConfigMaps and its own fields
//	signedurl   URLs that give access to one port of a private sandbox
//
// Formats and files:
//
//	portable    checkpoints and images as OCI artifacts, in files and registries
//	volumetree  the files of one volume, read and changed with more rights than its sandboxes have
//	durable     files that survive a crash
//	keyfile     files of random keys
//	migrate     the ledger of migrations of stored data
//	localca     the machine's certificate authority
//
// What every process needs:
//
//	errs        kinds of errors, by what a caller does about them
//	telemetry   log keys, metrics
//	auditlog    who did what to which sandbox
//	docsite     the documentation as a site
//	webfile     serves files that are part of the program
//	lifecycle   services that run and stop together
//	keyedlock   a lock by key
//	inflight    counts by key what is in progress, and bounds it
//	health      whether new work may begin
//	failpoint   where tests end the process; empty in releases
//
// # Imports
//
// Packages here import the API types and each other, never another plane. Code belongs here
// if two planes need it and it would be the same in each; code that only one plane needs stays there.
//
// # Failure
//
// No package here starts a goroutine that outlives a call, except those that lifecycle runs for its
// caller.
package base
