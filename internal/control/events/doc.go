// Package events records the lifecycle of sandboxes, in the words of E2B's API, and keeps it in a bbolt database of one
// server: a bounded log for each namespace, in order. It derives events from the watch of objects. For each sandbox the
// database has the state that the last event left, written in the transaction of the event. So a restart repeats none, and
// what happened before the process saw it is recorded when it does. It delivers nothing to anyone, and is no audit log.
//
//	namespaces/<namespace>/log     sequence number → Event
//	namespaces/<namespace>/bytes   size of the log
//	sandboxes                      UID → state
//	checkpoints                    UID → nothing; its event is recorded
//	cursors                        UID of a webhook → Cursor
//
// Recorder.mu guards its queue alone, and is not held over a call.
package events
