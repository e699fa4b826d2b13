// Package templates has the routes of templates, their builds, tags and uploaded files. It translates; the manager decides.
package templates
