// Package dashboard serves the web page of a server below /ui: its files, which are in the program, the sessions of people
// who have signed in with an API key, and what the page needs beside the REST API: a stream of sandboxes as they change, what
// became of one, its files and a terminal. A session holds the key, and each request is made by it, so that a revoked key
// ends its sessions. It decides nothing about sandboxes: changes go to the REST API, as those of any client.
//
// Pages of sandboxes may have this page's host, by the path form of the gateway, or a host of the same site. So a cookie
// alone authorizes nothing: see guard.
//
// hub.mu and subscriber.mu each guard one part; neither is held over a call of another package.
// Package timeline has the history of sandboxes.
package dashboard

//go:generate go run types/generate.go
