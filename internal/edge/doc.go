// Package edge describes the plane that clients talk to: HTTP in, the manager or a sandbox behind it.
// It holds no code itself.
//
//	e2b       the E2B REST API, translated into calls of the manager
//	gateway   the reverse proxy to the ports of sandboxes; gateway/fastpath serves its simple requests
//	sshd      SSH into sandboxes, over the gateway
//	dashboard the web page below /ui
//	route     where each sandbox's traffic goes, with hints from other replicas
//	peers     membership of the replicas, and the routes they push to each other
//	acme      certificates for public domains (RFC 8555)
//
// # A request
//
// The gateway finds the sandbox in the host name, in headers or in the path. Requests that name none are the
// API's. It looks the route up without a lock, checks the access token, wakes a paused sandbox
// if its owner allows that, and forwards the request over the http.Transport of the route's current epoch.
// The fast path does the same for simple requests at less cost, and falls back to this path for the rest.
//
// # Routes
//
// The route table follows the watch. A replica that changes a sandbox also pushes the
// new route to its peers, as a hint: it is used at once, and the watch confirms or replaces it. A hint never
// closes a connection.
//
// # Imports
//
// This plane imports base, the agent's wire format in guest, and of control the manager. It does not
// import the node: it reaches a sandbox by the address in its route.
//
// # Failure
//
// A replica that loses the API server continues with its routes until they are too old to trust, then
// answers 503. Ending the process closes client connections and changes no sandbox.
package edge
