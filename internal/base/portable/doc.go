// Package portable is the form in which a checkpoint leaves a machine: an OCI artifact, as an image layout
// in one tar or in a registry. It checks name, size and digest of the contents, and does not depend on how a
// node uses them; it keeps no blob in memory and writes no file. A container image comes from a registry
// in the same way, by [PullImage].
//
// # Form
//
// The manifest has artifactType [ArtifactType]. Its config is a [Config]; its layers are one of type
// [FilesType], the files beyond the base image as a layer of an image; then at most one [AgentType]; then
// any number of [VolumeType] and [MemoryType], whose titles say which volume and which file they are. Where
// the base image is part of it, an index has both manifests, and is what the tag names.
//
// # Order
//
// Our tars have their entries in the order in which a reader needs them: metadata, then the base
// image's layers, then the checkpoint's. So one that is read from a pipe needs no space. A tar
// with another order is read from a file, by [OpenFile].
//
// # Trust
//
// An artifact's author may be malicious. Each blob is checked against size and digest while it is read,
// and [Blob.Close] returns the result; metadata is bounded in size, and titles cannot leave a directory.
package portable
