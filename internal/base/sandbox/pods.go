package sandbox

import agents "github.com/barchan-dev/barchan/api/agents/v1beta1"

// NoMemory is why a cluster neither takes a checkpoint of a sandbox nor pauses one with its memory.
const NoMemory = "a Pod has no memory or root file system to keep"

// SuspendsAsPod reports whether a sandbox that is a Pod can be suspended: if it is to keep no more than its volumes.
func SuspendsAsPod(b *agents.BarchanSpec) bool { return b == nil || b.Suspend == agents.SuspendDelete }
