// Package scale measures a server with none, few and many sandboxes: how long it takes to boot over them, what it and an idle sandbox
// use of memory and processors, and how many can be made and killed without a rest.
package scale
