// Package sandboxes has the routes of sandboxes and of their snapshots, metrics and logs. It translates; the manager decides.
package sandboxes
