// Package gobench runs Go benchmarks of the source tree on the disk of the measured server, and reads what they print. Its chapters
// are the benchmarks that have their floors with them: the API server beside a bare etcd, and the lease table of addresses beside a
// bare commit. Other chapters run benchmarks for a floor, or for what needs no node.
package gobench
