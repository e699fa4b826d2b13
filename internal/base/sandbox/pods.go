package sandbox

// NoMemory is why a cluster neither takes a checkpoint of a sandbox nor pauses one with its memory.
const NoMemory = "a Pod has no memory or root file system to keep"
