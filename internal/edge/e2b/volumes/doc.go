// Package volumes has the routes of volumes and of their files. It translates; the manager decides.
package volumes
