// Package gateway brings traffic to sandboxes: it tells from a request's host, headers or path
// which sandbox and port are meant, looks its route up, checks who may pass, wakes what sleeps
// and wants to be woken, and then carries the request. What is not meant for a sandbox goes to
// the API's handler.
//
// The way of a request:
//
//	target (which sandbox, which port)  → 400
//	agent's internal routes             → 404
//	route                               → 502 unknown or dead; 503 before the table is synced
//	tokens                              → 403
//	asleep: wake, once for all waiting  → 502, 403, 409, 429, 503
//	connection of this life, exchange   → 502 port closed
//
// A connection to a sandbox belongs to one life of one route (package route). When the life
// ends, all its connections are closed in the same instant, so that streams end at once and an
// address used again never meets an old connection.
//
// The gateway decides nothing about sandboxes: it neither knows what a wake does nor how tokens
// are made, and it adds nothing to a response but what HTTP asks of a proxy.
//
// Locks: pool.mu, wakes.mu and flights.mu are never held together.
package gateway
