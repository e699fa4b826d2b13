// Package neighbors measures what one tenant notices while another one attacks: from inside its sandboxes, or from outside with its
// key. Requests, commands, claims and creates beside each attack stand beside the same when nothing attacks.
package neighbors
