// Package filetree copies directory trees with all properties that a file system keeps, and writes
// and reads them as tars and as layers of OCI images. It makes no calls to containerd, follows no
// symbolic link out of a tree, and reads no attribute of an overlay from a tar.
//
// It has no locks; each value belongs to one goroutine.
package filetree
