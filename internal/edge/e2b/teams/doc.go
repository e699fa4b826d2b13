// Package teams has the routes of a team and its keys. It translates; the manager decides.
package teams
