// Package events has the routes of sandboxes' events, of webhooks and of a team's metrics. It translates; the manager decides.
package events
