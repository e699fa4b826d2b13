package filetree

import "golang.org/x/sys/unix"

const ClockSlack = clockSlack

// Ahead counts the entries of the pre-copy.
func (t *Copy) Ahead() int { return len(t.ahead) }

// Settled reports whether the final copy may rely on a ctime.
func (t *Copy) Settled(ctim unix.Timespec) bool { return before(ctim, t.settled) }
