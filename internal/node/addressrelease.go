package node

// The address of a sandbox that sleeps on disk is its own, unless Config.ReleaseAddresses says that
// it is given back, or only its volume claims are kept. The order of giving it back is
//
//	label of the record → row of the journal, without it → books
//
// so that an address in the books of nobody is in nobody's row. A lease that a death leaves behind
// goes at the next start ([suspend.Suspender.AtRest]). A wake takes an address as a create does: the row has it
// from when it says live again, and until then the books alone.
