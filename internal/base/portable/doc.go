// Package portable is the form in which a checkpoint leaves a machine: an OCI artifact, as an image layout
// in one tar or in a registry. It knows what is in it by name, size and digest, and nothing of what a
// node does with it; it keeps no blob in memory and writes no file. A container image comes from a registry
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
// Our tars have their entries in the order in which a reader needs them: what describes, then the base
// image's layers, then the checkpoint's. So one that is read from a pipe needs no room. A tar
// of others, in whatever order, is read from a file, by [OpenFile].
//
// # Trust
//
// Whoever made an artifact may have meant harm. Each blob is checked against size and digest on the way,
// and [Blob.Close] tells; what describes is bounded in size, and titles cannot lead out of a directory.
package portable
