// Package layers runs the layers of a template build: it groups steps into layers, finds those that are kept, and runs
// the others in sandboxes, each with the files, mounts, caches and secrets that its steps need.
//
// # Chains
//
// The layers of the template are a chain on what the build starts from; those of each stage are another. A chain is finished
// when its files are needed: the template's always, that of a stage when a step takes files of it and their archive is not kept.
//
// # Sandboxes
//
// They are members of pool.BuildPool, so that no claim gets one and clients do not see them. Their start yields to claims as
// that of other members does. Each holds the namespace's quota while it runs. Programs run in them alone, and files are unpacked
// in them alone.
//
// # Errors
//
// A *buildlog.Failure ends the build; any other error may pass, and the build is tried again.
package layers
