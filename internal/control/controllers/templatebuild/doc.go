// Package templatebuild runs TemplateBuilds: it turns an image or a template, and steps, into a SandboxTemplate.
//
// # Layers
//
// Steps form layers. A layer ends with a step that changes files by itself, Run or Copy; the steps before it that only set
// something belong to it. A layer is run in a sandbox of its own, which starts from the layer below, and its files are kept as a Checkpoint whose name
// is a hash of the layer below, the instructions and the files that are copied. So a layer that exists is never run again, by
// whichever build of the namespace, and a build that a crash interrupts goes on after its last layer: nothing else has to be
// recorded. The sandbox is deleted after each layer; the owner references of sandboxes remove those of a deleted build.
//
// The last layer, with what StartCommand has started, is a Checkpoint with memory. The template is written last, by one write.
//
// # Lock
//
// reconciler.mu guards the running builds; it is held over no call.
package templatebuild
