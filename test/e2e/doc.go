// Package e2e drives a whole server with real clients: the command line, kubectl and the
// unmodified E2B SDK. It has tests alone; each server that they start has its own directories,
// ports, bridge, namespaces and cgroups, and is removed with everything that it made.
package e2e
