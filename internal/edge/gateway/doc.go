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
//	rate                                → 429
//	held by an idle pause: wait         → 409
//	connection of this life, exchange   → 502 port closed
//
// Requests are read by the server of net/http. A connection of HTTP/1.1 on which plain requests to
// running sandboxes come is taken over by a lane, which reads it with less work, and goes back to that
// server with the first thing that is not plain: in a request, in what has to be done for it, or in
// the sandbox's answer. A lane makes no answer of its own.
//
// A connection to a sandbox belongs to one life of one route (package route). When the life
// ends, all its connections are closed in the same instant, so that streams end at once and an
// address used again never meets an old connection.
//
// The gateway decides nothing about sandboxes: it neither knows what a wake does nor how tokens
// are made, and it adds nothing to a response but what HTTP asks of a proxy, and the cookie of a signed URL.
//
// Locks: pool.mu may be taken with quiet.mu held; of the others, lanes.mu among them, no two are held
// together.
package gateway
