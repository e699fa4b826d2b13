// Package proc reads from /proc which processes of the machine there are, and what they use of memory and processors. It is for
// weighing programs from outside; it changes nothing.
package proc
