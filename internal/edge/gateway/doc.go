// Package gateway proxies traffic to sandboxes: it derives the sandbox and port from a request's host,
// headers or path, looks up the route, checks access, wakes a paused sandbox if its policy allows, and
// then forwards the request. Other requests go to the API's handler.
//
// The steps of a request and the local replies of each:
//
//	target   (which sandbox, which port)  → 400
//	agent's internal routes             → 404
//	route                               → 502 unknown or dead; 503 before the table is synced
//	tokens                              → 403
//	paused: one wake for all waiting    → 502, 403, 409, 429, 503
//	rate                                → 429
//	held by an idle pause: wait         → 409
//	connection of this epoch, exchange  → 502 port closed
//
//	server       the server of net/http behind a filter for ambiguous requests; TLS and plain HTTP on one port
//	framing      where HTTP/1 messages end, and which are ambiguous
//	target       which sandbox and port a request is for
//	requestbody  the client's body as a transport reads it
//	endpoint     the connections to one sandbox in one epoch
//	fastpath     simple requests at less cost
//	credentials  API keys, tokens, signed URLs and their cookie
//	wake         one resume per paused sandbox, however many requests wait
//	traffic      requests in progress: for drains, idle policies and stream timeouts
//	idle         the execution of idle policies
//	accesslog    the log of requests
//	ratelimit    limits by sandbox, key and client address
//	reply        the local replies
//	headers      the headers that the gateway reads or removes
//
// This package has the exchange of one request, and connects these.
//
// The server of net/http reads requests. A connection of HTTP/1.1 with simple requests to running
// sandboxes moves to the fast path (package fastpath), which reads it at less cost. It falls back to
// net/http with the first request, response or processing step that is not simple. The fast path makes
// no local replies.
//
// A connection to a sandbox belongs to one epoch of one route (package route). When the epoch ends,
// all its connections are closed at once: streams end, and a reused address never gets an old
// connection.
//
// The gateway makes no decisions about sandboxes: a Waker resumes them, and Tokens has their secrets.
// It adds nothing to a response but what HTTP requires of a proxy, and the cookie of a signed URL.
//
// Lock order: no two locks of this package are held together; those of its parts are in their comments.
package gateway
