package node

// A sandbox on disk keeps its address, unless Config.ReleaseAddresses is set or only its volume claims are kept. The release
// removes the address in this order
//
//	label of the container record → row of the journal → lease
//
// so that an address without a lease is in no row. After a crash in between, the next start releases the lease
// ([suspend.Suspender.AtRest]). A resume takes an address as a create does: until the row is live, only the lease has it.
